"""What README.md and the lessons claim, in a form that can be checked. `test_docs.py` checks it.

A block is indented by four spaces, with an empty line above and below. Its first word says what it is: a command of
COMMANDS makes it shell, run line by line; `from`, `import`, `def` or `class` make it Python, run as a program; anything
else is text. Text after a command, under the same heading or after an empty line in the same block, is what the command
prints: these lines, in this order, with `…` for anything. A comment before a block says how it is run, and does what a
reader does by hand:

    <!-- docs-test: append training.steps=3 -->     shell: put at the end of every command
    <!-- docs-test: replace OLD -> NEW -->          any: in the block's text
    <!-- docs-test: edit model.py: OLD -> NEW -->   shell: the edit that the page describes, undone afterwards
    <!-- docs-test: exit 1 -->                      shell: the exit code expected of each command
    <!-- docs-test: plan -->                        shell: the machines are missing; `--dry-run` instead of training
    <!-- docs-test: skip WHY -->                    any: not run
    <!-- docs-test: file my_schedule.py -->         Python: not run, but written into this file
    <!-- docs-test: numbers vary -->                text: the same words, other numbers
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("python", "torchrun", "make", "git", "pytest")
DIRECTIVES = ("append", "replace", "edit", "exit", "plan", "skip", "file", "numbers")
MADE_BY_READERS = ("my.txt",)  # what a page says is the reader's own
FOLDERS = ("docs", "benchmarks", "tests")  # beside the top level: whose names a page may name
TIMEOUT = 120  # seconds for one command


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """kind: "shell", "python" or "text"; line: where it starts in its page; section: the heading above it."""

    kind: str
    text: str
    line: int
    section: str
    directives: list = field(default_factory=list)  # of (word, rest)

    def all(self, word):
        return [rest for name, rest in self.directives if name == word]

    @property
    def commands(self):
        """The commands of a shell block, each on one line."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def read_blocks(text):
    """The blocks of a page, in order. Raises ValueError for a directive that there is not."""
    blocks, directives, section, lines = [], [], "", text.splitlines()
    position = 0
    while position < len(lines):
        line = lines[position]
        if directive := re.fullmatch(r"<!-- docs-test: (\w+) ?(.*) -->", line):
            if directive[1] not in DIRECTIVES:
                raise ValueError(f"line {position + 1}: docs-test has no {directive[1]!r}, but {', '.join(DIRECTIVES)}")
            directives.append((directive[1], directive[2]))
        elif heading := re.match(r"#+ (.*)", line):
            section = heading[1]
        elif line.startswith("    ") and (position == 0 or not lines[position - 1].strip()):
            start = position
            while position < len(lines) and (lines[position].startswith("    ") or not lines[position].strip()):
                position += 1
            block = "\n".join(line[4:] for line in lines[start:position]).rstrip()
            command, _, printed = block.partition("\n\n")
            if kind_of(block) == "shell" and printed and kind_of(printed) == "text":
                blocks.append(Block("shell", command, start + 1, section, directives))
                block, start, directives = printed, start + command.count("\n") + 2, []
            blocks.append(Block(kind_of(block), block, start + 1, section, directives))
            directives = []
            continue
        elif line.strip() and directives:
            raise ValueError(f"line {position + 1}: docs-test {directives[0][0]} has no block below it")
        position += 1
    return blocks


def kind_of(block):
    word = block.split(None, 1)[0]
    return "shell" if word in COMMANDS else "python" if word in ("from", "import", "def", "class") else "text"


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """A command that was run."""

    folder: Path
    command: str
    exit_code: int
    output: str
    seconds: float


ran = []  # all of them, for the list at the end


def run(command, folder):
    """Runs `command` with a shell in `folder`, with this Python's programs first on the path, no GPU and no network."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "MAKEFLAGS": "",
    }
    started = time.perf_counter()
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\nnot done after {TIMEOUT} s"
    result = Ran(folder, command, process.returncode, output, time.perf_counter() - started)
    ran.append(result)
    return result


def copy_project(folder, cache):
    """The project's files in `folder`, as a git repository of its own. What is tokenised is kept in `cache`."""
    for path in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    for name in MADE_BY_READERS:
        shutil.copy(ROOT / "README.md", folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=docs", "-c", "user.email=docs@localhost", "commit", "--quiet", "--message", "copy")
    (folder / "cache").symlink_to(cache)
    (folder / ".venv").mkdir()  # this Python's, for `make`, which then finds nothing to install
    for path in Path(sys.prefix).iterdir():
        (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv/installed.txt").unlink(missing_ok=True)
    shutil.copy(folder / "requirements.txt", folder / ".venv/installed.txt")


def clean(folder):
    """`folder` as `copy_project` has made it."""
    git(folder, "checkout", "--quiet", ".")
    git(folder, "clean", "-dfxq", "--exclude=cache", "--exclude=.venv", "--exclude=__pycache__")


def git(folder, *arguments):
    """What git prints. Raises CalledProcessError."""
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def run_block(block, folder, output):
    """Runs a block, or compares it with `output`, the one before it. Returns (what is wrong, its own output)."""
    if block.all("skip"):
        return [], output
    for change in block.all("replace"):
        old, new = change.split(" -> ")
        if old not in block.text:
            return [f"line {block.line}: docs-test replace: there is no {old!r}"], output
        block.text = block.text.replace(old, new)
    if block.kind == "text":
        line = missing_line(block.text, output, bool(block.all("numbers"))) if output is not None else None
        return [f"line {block.line}: the output has no line {line!r} here; it is\n{output}"] if line else [], output
    if block.all("file"):
        (folder / block.all("file")[0]).write_text(block.text + "\n")
        return [], output
    if block.kind == "python":
        (folder / "block.py").write_text(block.text + "\n")
        commands = ["python block.py"]
    else:
        commands = [adjusted(command, block) for command in block.commands]
    originals = {}
    for edit in block.all("edit"):
        name, old, new = re.fullmatch(r"(.+?): (.+) -> (.*)", edit).groups()
        text = (folder / name).read_text()
        originals.setdefault(name, text)
        if text.count(old) != 1:
            return [f"line {block.line}: docs-test edit: {name} has {text.count(old)} times {old!r}"], output
        (folder / name).write_text(text.replace(old, new))
    expected, wrong, output = int((block.all("exit") or ["0"])[0]), [], ""
    for command in commands:
        if command.split()[0] not in COMMANDS:
            wrong.append(f"line {block.line}: {command!r} does not start with one of {', '.join(COMMANDS)}")
            continue
        result = run(command, folder)
        output += result.output
        if result.exit_code != expected:
            wrong.append(
                f"line {block.line}: `{command}` ended with {result.exit_code}, not {expected}:\n{result.output}"
            )
    for name, text in originals.items():
        (folder / name).write_text(text)
    return wrong, output


def adjusted(command, block):
    """`command` without its comment, as the block's directives want it."""
    command = re.sub(r"\s+#.*", "", command)
    if block.all("plan"):
        command = re.sub(r"^torchrun .*?train\.py", "python train.py", command) + " --dry-run"
    return " ".join([command, *block.all("append")])


def missing_line(excerpt, output, numbers_vary=False):
    """The first line of `excerpt` that `output` does not have after the ones before; None if it has them all."""
    lines = iter(output.splitlines())
    for wanted in filter(str.strip, excerpt.splitlines()):
        pattern = re.escape(wanted.rstrip()).replace("…", ".*")
        if numbers_vary:
            pattern = re.sub(r"\d[\d,]*(\\\.\d+)?(e(\\-|\+|\\\+)\d+)?", r"[-+\\d.,e]+", pattern)
            pattern = re.sub(r"(\\ )+", " +", pattern)
        if not any(re.fullmatch(pattern, line.rstrip()) for line in lines):
            return wanted
    return None


# --- mentions ---------------------------------------------------------------------------------------------------------


@cache
def identifiers():
    """Every name in the code, such keys of dictionaries and names of files as are strings, and {class: its names}."""
    names, classes = set(), {}
    for path in [*ROOT.glob("*.py"), *(path for part in FOLDERS for path in ROOT.glob(f"{part}/**/*.py"))]:
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            for attribute in ("id", "attr", "name", "arg"):
                if isinstance(name := getattr(node, attribute, None), str):
                    names.update(name.split("."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.parent == ROOT:
                names.add(node.value)
            if isinstance(node, ast.ClassDef):
                inner = classes.setdefault(node.name, set())
                for child in ast.walk(node):
                    inner |= {getattr(child, key) for key in ("name", "attr", "id") if hasattr(child, key)}
    for path in ROOT.glob("docs/**/*.patch"):  # what exercises ask to be written
        names.update(re.findall(r"(?m)^\+ *(?:def|class) (\w+)", path.read_text()))
    return names, classes


def wrong_mentions(text, folder):
    """What a page in `folder` names and is not there: links, paths, names in the code, keys, options, line counts."""
    blocks = read_blocks(text)
    prose = re.sub(r"(?m)^    .*$", "", text)
    commands = "\n".join(block.text for block in blocks if block.kind == "shell")
    for line in prose.splitlines():
        if line.count("`") % 2:
            yield f"inline code goes over the end of the line {line!r}"
    code = re.findall(r"`([^`\n]+)`", prose)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose)
    for link in filter(None, sum(links, ())):
        target = link.split("#")[0]
        if target and "://" not in target and not (folder / target).exists():
            yield f"the link {link} leads nowhere"
    for span in [*code, *re.findall(r"\S+", commands)]:
        yield from wrong_keys(span)
    for span in code:
        if is_path(span):
            if not ((ROOT / span).exists() or (folder / span).exists() or span in commands or span in identifiers()[0]):
                yield f"there is no file `{span}`"
        elif re.fullmatch(r"--[\w-]+", span):
            if not any(f'"{span}"' in path.read_text() for path in ROOT.glob("*.py")) and span not in commands:
                yield f"no program has the option `{span}`"
        elif re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(\(.*\))?", span):
            yield from wrong_names(re.sub(r"\(.*", "", span), is_call="(" in span)
    for name, count in re.findall(r"`([\w/]+\.py)`(?: \(| \| )(\d+)(?= lines\)| \|)", prose):
        if (ROOT / name).exists() and (lines := len((ROOT / name).read_text().splitlines())) != int(count):
            yield f"`{name}` has {lines} lines, not {count}"


def is_path(span):
    return re.fullmatch(r"[\w./-]+\.(py|json|md|svg|html|sbatch|txt|toml|patch|parquet|jsonl)", span) or re.fullmatch(
        r"(\w[\w.-]*/)+", span
    )


def wrong_keys(span):
    from config import VALID_KEYS, Config

    for section, key in re.findall(rf"(?<![\w./])({'|'.join(Config.model_fields)})\.(\w+)", span):
        if f"{section}.{key}" not in VALID_KEYS and key not in ("py", "parameters"):
            yield f"there is no key `{section}.{key}`"


def wrong_names(name, is_call):
    """A name in backticks is taken for one in the code when it is called, has a point, a capital inside or a _."""
    names, classes = identifiers()
    first, *rest = name.split(".")
    if not (is_call or rest or "_" in name or re.search(r"[a-z][A-Z]", name)):
        return
    if first in classes and rest:
        if rest[0] not in classes[first]:
            yield f"`{first}` has no `{rest[0]}`"
    elif missing := [part for part in (first, *rest) if part not in names and part not in ("torch", "transformers")]:
        if not is_key(name):
            yield f"there is no `{missing[0]}` in the code (`{name}`)"


def is_key(name):
    from config import VALID_KEYS

    return name in VALID_KEYS
