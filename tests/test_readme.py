"""What README.md says about keys and files is what the code has."""

import json
import re
import subprocess
from pathlib import Path

from config import VALID_KEYS, Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_configuration_table_has_every_key_with_its_default():
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| `?(.*?)`? \| (.*) \|$", README[README.index("## Configuration") :], re.M)
    older_forms = {"model.rope_theta", "model.rope_scaling"}
    assert [f"{section}.{key}" for section, key, *_ in rows] == [key for key in VALID_KEYS if key not in older_forms]
    standard = Config()
    for section, key, default, meaning in rows:
        derived = key in ("num_key_value_heads", "head_dim", "rope_parameters")
        value = getattr(getattr(standard, section), key)
        assert derived or json.loads(default) == value, f"{section}.{key}"
        assert meaning


def test_every_top_level_file_is_in_the_reading_order():
    table = README[README.index("## The files") :].split("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+\.py)`", table, re.M)
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert sorted(listed) == sorted(name for name in files.split() if "/" not in name)  # without the reader's own


def test_files_that_are_named_exist():
    for name in re.findall(r"[`/ ]((?:configs|slurm|tests|docs|benchmarks)/[\w./-]+\.\w+)", README):
        assert (ROOT / name).exists(), name
