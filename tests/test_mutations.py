"""The tests notice: a copy of the project with one thing taken out of its arithmetic must fail a test."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLAIN = "tests/test_layouts.py::test_layout_trains_like_plain_pytorch"
MUTATIONS = {
    "loss not divided by the number of micro-batches": (
        "pipeline_parallel.py", "output = output / self.num_microbatches", "output = output / 1",
        "tests/test_layouts.py::test_gradients_do_not_grow_with_accumulation[4]",
    ),
    "gradients not divided by dp_size": (
        "data_parallel.py", "gradient.div_(self.dp_size)", "gradient.div_(1)",
        f"{PLAIN}[(1, 1, 2)-1f1b-untied-unclipped]",
    ),
    "no all-reduce over dp": (
        "data_parallel.py", "self.work = dist.all_reduce(self.gradients, group=group, async_op=True)",
        "self.work = dist.barrier(group=group, async_op=True)", f"{PLAIN}[(1, 1, 2)-1f1b-untied-unclipped]",
    ),
    "no all-reduce in f": (
        "tensor_parallel.py", "dist.all_reduce(grad, group=ctx.group)", "pass",
        f"{PLAIN}[(2, 1, 1)-1f1b-untied-unclipped]",
    ),
    "no all-reduce in g": (
        "tensor_parallel.py", "dist.all_reduce(x, group=group)", "pass", f"{PLAIN}[(2, 1, 1)-1f1b-untied-unclipped]",
    ),
    "no all-reduce in the cross entropy": (
        "tensor_parallel.py", "dist.all_reduce(sums, group=group)", "pass", f"{PLAIN}[(2, 1, 1)-1f1b-untied-unclipped]",
    ),
    "tied gradients not summed": (
        "data_parallel.py", "dist.all_reduce(gradient, group=pgm.process_group_manager.embedding_group)", "pass",
        f"{PLAIN}[(1, 2, 1)-1f1b-tied-unclipped]",
    ),
    "norm weights not summed over tp": (
        "data_parallel.py", "dist.all_reduce(gradient, group=pgm.process_group_manager.tp_group)", "pass",
        "tests/test_layouts.py::test_options_and_their_pairs_change_no_number"
        "[(2, 2, 1)-sequence parallel and sequence parallel-untied]",
    ),
    "tied copy counted twice in the norm": (
        "data_parallel.py", 'and not getattr(parameter, "is_copy", False)', "", f"{PLAIN}[(1, 2, 1)-1f1b-tied-clipped]",
    ),
    "dp groups along the wrong axis": (
        "process_group_manager.py", "grid.permute(1, 2, 0).reshape(-1, dp_size)", "grid.reshape(-1, dp_size)",
        f"{PLAIN}[(2, 1, 2)-1f1b-untied-unclipped]",
    ),
    "two ranks take each other's shard": (
        "tensor_parallel.py", "*shard_range(full.size(dim), rank, num_shards)",
        "*shard_range(full.size(dim), num_shards - 1 - rank, num_shards)",
        f"{PLAIN}[(2, 1, 1)-1f1b-untied-unclipped]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fails_its_test(name, tmp_path):
    file, old, new, test = MUTATIONS[name]
    for source in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(source, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    text = (tmp_path / file).read_text()
    assert text.count(old) == 1, "the mutation no longer fits the source"
    (tmp_path / file).write_text(text.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert process.returncode == 1 and "1 failed" in process.stdout, process.stdout[-2000:] + process.stderr[-2000:]
