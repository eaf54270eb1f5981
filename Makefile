# `make` lists the targets. Only missing steps are done again. Needs Python 3.10 or newer, nothing else.

PYTHON = python3
NPROC = 4
CONFIG = configs/tiny_pp2_tp2.json
ARGS =
FIGURES =

# requirements.txt is copied to .venv/unfinished before the first step and renamed to .venv/installed.txt after the last.
# So installed.txt says what is installed, and unfinished that somebody was interrupted: then .venv is made anew, because
# pip may take a package for installed of which only half was copied.
INSTALLED = .venv/installed.txt
UNFINISHED = .venv/unfinished

.PHONY: help train test docs-test lint figures venv install clean

help:
	@echo "make train  train on $(NPROC) processes with $(CONFIG)"
	@echo "            (or: make train NPROC=8 CONFIG=configs/my_config.json ARGS='training.steps=20')"
	@echo "make test   run the tests"
	@echo "make docs-test  run every command of README.md and docs/lessons, and check what they name"
	@echo "make lint   check style and formatting"
	@echo "make figures  make docs/figures and docs/schedules.html, from runs on this machine"
	@echo "make venv   only the set-up that these begin with: make .venv, install requirements.txt"
	@echo "make clean  remove .venv and the tools' caches"

train: venv
	.venv/bin/torchrun --nproc_per_node $(NPROC) train.py --config $(CONFIG) $(ARGS)

test: venv
	.venv/bin/pytest -q tests

docs-test: venv
	.venv/bin/pytest -q docs

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

figures: venv
	.venv/bin/python docs/figures.py $(FIGURES)

venv:
	@if [ -e $(UNFINISHED) ] || ! cmp -s requirements.txt $(INSTALLED) || ! .venv/bin/python -c '' 2>/dev/null; then \
		$(MAKE) --no-print-directory install; \
	fi

install:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python 3.10 or newer is needed; $(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
		echo "If there is another one, name it: make PYTHON=python3.12 venv"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments (on Debian or Ubuntu: apt-get install python3-venv)"; exit 1; }
	@if [ -e $(UNFINISHED) ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
		echo "Making .venv"; \
		rm -rf .venv && mkdir .venv && cp requirements.txt $(UNFINISHED) && $(PYTHON) -m venv .venv; \
	fi
	@cp requirements.txt $(UNFINISHED)
	@echo "Installing requirements.txt into .venv (some minutes the first time)"
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@mv $(UNFINISHED) $(INSTALLED)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
