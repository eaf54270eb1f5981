"""README.md and the lessons do what they say. `make docs-test` runs this; it ends with the list of commands.

Every command is run in a copy of the project, every excerpt of an output is looked for in that output, and whatever the
text names has to exist. An exercise's check has to fail on the project as it is, and pass with the solution's patch.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pages
import pytest
from pages import ROOT, Block, clean, copy_project, git, missing_line, read_blocks, run, run_block, wrong_mentions

LESSONS = sorted((ROOT / "docs/lessons").glob("*.md"))
PAGES = [ROOT / "README.md", *LESSONS]
EXERCISES = sorted(path for path in LESSONS if path.name[0].isdigit())


def name(path):
    return str(path.relative_to(ROOT))


def is_exercise(block):
    return block.section.startswith("Exercise") and block.kind == "shell"


@pytest.fixture(scope="session")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    copy_project(folder, tmp_path_factory.mktemp("cache"))
    return folder


@pytest.fixture
def project(copy):
    """A copy of the project to run commands in; what they leave behind is taken away."""
    yield copy
    clean(copy)


@pytest.fixture(scope="session", autouse=True)
def exercises(request, tmp_path_factory):
    """{page: what `try_exercise` will return}. In a thread, beside the pages' commands: while one process starts the
    others of torchrun, a second core has nothing to do.
    """
    items = [item for item in request.session.items if item.name.startswith("test_exercise_")]
    selected = [item.callspec.params["page"] for item in items]
    folder = tmp_path_factory.mktemp("exercises")
    if selected:
        copy_project(folder, tmp_path_factory.mktemp("cache"))
    pool = ThreadPoolExecutor(1)
    yield {page: pool.submit(try_exercise, page, folder) for page in selected}
    pool.shutdown(cancel_futures=True)


def try_exercise(page, folder):
    """The exercise's check on the project as it is, and with the solution."""
    (block,) = filter(is_exercise, read_blocks(page.read_text()))
    (command,) = block.commands
    before = run(command, folder)
    git(folder, "apply", f"docs/lessons/solutions/{page.name[:2]}.patch")
    after = run(command, folder)
    clean(folder)
    return before, after


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_their_outputs(page, project):
    wrong, output, section = [], None, None
    for block in read_blocks(page.read_text()):
        output, section = output if block.section == section else None, block.section
        if not is_exercise(block):
            problems, output = run_block(block, project, output)
            wrong += problems
    assert not wrong, f"{name(page)}: " + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_named_exists(page):
    wrong = list(wrong_mentions(page.read_text(), page.parent))
    assert not wrong, f"{name(page)}: " + "; ".join(wrong)


@pytest.mark.parametrize("page", EXERCISES, ids=name)
def test_exercise_fails_before_its_solution_and_passes_after(page, exercises):
    before, after = exercises[page].result()
    assert before.exit_code == 1 and before.output.startswith("not yet: "), before.output
    assert after.exit_code == 0 and "right: " in after.output, after.output


def test_every_lesson_has_its_page_exercise_and_solution():
    numbers = [f"{i:02}" for i in range(1, 13)]
    for folder, ending in (("", ".md"), ("exercises", ".py"), ("solutions", ".patch")):
        files = sorted((ROOT / "docs/lessons" / folder).glob(f"[0-9]*{ending}"))
        assert [path.name[:2] for path in files] == numbers


# --- the checks themselves ---


def problems_of(page, folder):
    output, problems = None, []
    for block in read_blocks(page):
        found, output = run_block(block, folder, output)
        problems += found
    for command in [command for command in pages.ran if command.folder == folder]:
        pages.ran.remove(command)  # it is on no page
    return problems


def test_a_failing_command_is_found(tmp_path):
    assert problems_of("\n    python -c 'print(1)'\n", tmp_path) == []
    (problem,) = problems_of("text\n\n    python -c 'exit(3)'\n", tmp_path)
    assert problem.startswith("line 3: `python -c 'exit(3)'` ended with 3, not 0")
    assert problems_of("<!-- docs-test: exit 3 -->\n\n    python -c 'exit(3)'\n", tmp_path) == []
    (problem,) = problems_of("\n    python -c 'print(1)'\n    rm file\n", tmp_path)
    assert "'rm file' does not start with one of" in problem


def test_another_output_is_found(tmp_path):
    page = "# A\n\n    python -c 'print(1, 2); print(3)'\n\nprints\n\n    "
    assert problems_of(page + "1 2\n    3\n", tmp_path) == problems_of(page + "1 …\n", tmp_path) == []
    for excerpt in ("1 2\n    4\n", "3\n    1 2\n", "1  2\n"):
        assert "the output has no line" in problems_of(page + excerpt, tmp_path)[0]


def test_numbers_may_vary_and_words_not():
    assert missing_line("loss 5.61 | 1,024 tokens", "loss  4.2 | 9 tokens", numbers_vary=True) is None
    assert missing_line("error 3.0e-16", "error 1.5e+00", numbers_vary=True) is None
    assert missing_line("loss 5.61", "lost 5.61", numbers_vary=True) == "loss 5.61"
    assert missing_line("loss 5.61", "loss 5.62") == "loss 5.61"


def test_directives(tmp_path):
    (tmp_path / "code.py").write_text("print(1 + 1)\n")
    page = "<!-- docs-test: edit code.py: 1 + 1 -> 1 -->\n\n    python code.py  # comment\n\n    1\n"
    assert problems_of(page, tmp_path) == []
    assert (tmp_path / "code.py").read_text() == "print(1 + 1)\n"
    assert "2 times '1'" in problems_of(page.replace("1 + 1", "1"), tmp_path)[0]
    shell = Block("shell", "torchrun --nproc_per_node 8 train.py --config a.json", 1, "", [("plan", "gpus")])
    assert pages.adjusted(shell.text, shell) == "python train.py --config a.json --dry-run"
    with pytest.raises(ValueError, match="line 1: docs-test has no 'sleep'"):
        read_blocks("<!-- docs-test: sleep 1 -->\n")
    with pytest.raises(ValueError, match="line 2: docs-test exit has no block below it"):
        read_blocks("<!-- docs-test: exit 1 -->\ntext\n")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[a](nowhere.md)", "the link nowhere.md leads nowhere"),
        ("![a](figures/nowhere.svg)", "the link figures/nowhere.svg leads nowhere"),
        ("`docs/nowhere.py`", "there is no file `docs/nowhere.py`"),
        ("`no_such_function`", "there is no `no_such_function` in the code (`no_such_function`)"),
        ("`nosuch()`", "there is no `nosuch` in the code (`nosuch`)"),
        ("`PipelineExecutor.no_such`", "`PipelineExecutor` has no `no_such`"),
        ("`training.step=3`", "there is no key `training.step`"),
        ("\n    python train.py model.layers=3", "there is no key `model.layers`"),
        ("`--no-such-option`", "no program has the option `--no-such-option`"),
        ("`train.py` (3 lines)", f"`train.py` has {len((ROOT / 'train.py').read_text().splitlines())} lines, not 3"),
        ("`two\nlines`", "inline code goes over the end of the line '`two'"),
        ("| `train.py` | 3 |", f"`train.py` has {len((ROOT / 'train.py').read_text().splitlines())} lines, not 3"),
    ],
)
def test_what_does_not_exist_is_found(text, problem):
    assert next(wrong_mentions(text, ROOT / "docs")) == problem


def test_what_exists_is_not_complained_about():
    text = (
        "[a](figures/../pages.py) `train.py` `configs/` `zb_h1` `PipelineExecutor.forward` `rank_grid(2, 2, 1)` `F3'` "
        "`B` `training.steps=3` `distributed.pp_engine` `--verify` `torch.nn.Linear` `fit()`-less words, `out.svg`\n\n"
        "    python visualize.py zb_h1 --pp-size 4 --microbatches 8 -o out.svg\n"
    ).replace(" `fit()`-less words,", "")
    assert list(wrong_mentions(text, ROOT / "docs")) == []
    assert re.fullmatch(r"[\w/.]+", name(Path(__file__)))
