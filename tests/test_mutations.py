"""The tests notice: with one division, sum, order or dtype of the project's arithmetic changed, a test fails.

The change is on the ranks only: they import the changed file, while the test's own process compares with plain PyTorch
and the model as it is. The tests that have to fail are those of test_layouts.py and test_bfloat16.py.
"""

import functools
import importlib
import math
import sys
from pathlib import Path

import pytest

import test_bfloat16
from test_layouts import PROBLEMS, check
from workers import WorkerPool

ROOT = Path(__file__).parent.parent
TP, PP, DP = (2, 1, 1), (1, 2, 1), (1, 1, 2)
ZERO1, SEQUENCE_PARALLEL, IN_PIECES = dict(zero1=True), dict(sequence_parallel=True), dict(logits_bytes=2000)
MUTATIONS = {  # file, what is there, what replaces it, a layout and options whose test has to fail
    "loss not divided by the number of micro-batches": (
        "pipeline_parallel.py", "output = output / self.num_microbatches", "output = output / 1", PP, {},
    ),
    "losses of micro-batches not added": (
        "pipeline_parallel.py", "return torch.stack(self.losses).sum()", "return self.losses[0]", PP, {},
    ),
    "logged loss not divided by dp_size": (
        "pipeline_parallel.py", "return loss / manager.dp_size", "return loss", DP, {},
    ),
    "logged loss not summed": (
        "pipeline_parallel.py", "dist.all_reduce(loss, group=manager.pp_dp_group)", "pass", DP, {},
    ),
    "a stage's layers in another order": (
        "pipeline_parallel.py", "for i in self.layers[self.stages[chunk]]:",
        "for i in reversed(self.layers[self.stages[chunk]]):", (1, 1, 1), {},
    ),
    "pieces of the loss not weighted": (
        "model.py", "* (piece[1].numel() / targets.numel())", "* 1", (1, 1, 1), IN_PIECES,
    ),
    "gradients not divided by dp_size": (
        "data_parallel.py", "gradient.div_(self.dp_size)", "gradient.div_(1)", DP, {},
    ),
    "no all-reduce over dp": (
        "data_parallel.py", "self.work = dist.all_reduce(self.gradients, group=group, async_op=True)",
        "self.work = dist.barrier(group=group, async_op=True)", DP, {},
    ),
    "zero1: no all-gather of the new weights": (
        "data_parallel.py",
        "dist.all_gather_single(self.values, mine.clone(), group=pgm.process_group_manager.dp_group)", "pass",
        DP, ZERO1,
    ),
    "zero1: two ranks take each other's shard": (
        "data_parallel.py", "slice(manager.dp_rank * shard_length, (manager.dp_rank + 1) * shard_length)",
        "slice((1 - manager.dp_rank) * shard_length, (2 - manager.dp_rank) * shard_length)", DP, ZERO1,
    ),
    "zero1: only one rank's shard in the norm": (
        "data_parallel.py", "(self.zero1 or manager.dp_rank == 0)", "manager.dp_rank == 0", DP, ZERO1,
    ),
    "norms of ranks not added": ("data_parallel.py", "dist.all_reduce(squares)", "pass", TP, {}),
    "replicated weights counted twice in the norm": (
        "data_parallel.py", 'hasattr(parameter, "shard") or pgm.process_group_manager.tp_rank == 0', "True", TP, {},
    ),
    "tied copy counted twice in the norm": (
        "data_parallel.py", 'and not getattr(parameter, "is_copy", False)', "", PP, {},
    ),
    "tied gradients not summed": (
        "data_parallel.py", "dist.all_reduce(self.gradient, group=pgm.process_group_manager.embedding_group)", "pass",
        PP, {},
    ),
    "norm weights not summed over tp": (
        "data_parallel.py", "dist.all_reduce(self.gradient, group=pgm.process_group_manager.tp_group)", "pass",
        TP, SEQUENCE_PARALLEL,
    ),
    "no all-reduce in f": (
        "parallel_region.py", "finish = start_all_reduce(grad, ctx.region.group)", "finish = lambda: None", TP, {},
    ),
    "weight gradients that are put aside and forgotten": (
        "parallel_region.py", "self.aside.pop(0)()", "self.aside.pop(0)", TP, {},
    ),
    "no all-reduce in g": ("parallel_region.py", "all_reduce(x, region.group)\n        return x", "return x", TP, {}),
    "no sum in reduce-scatter": (
        "parallel_region.py", "mine, dist.reduce_scatter_single(mine, parts, group=group, async_op=True).wait",
        "mine.copy_(parts[group.rank() * x.size(0) :][: x.size(0)]), lambda: None", TP, SEQUENCE_PARALLEL,
    ),
    "no all-reduce of the largest logit": (
        "tensor_parallel.py", "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "pass", TP, {},
    ),
    "no all-reduce in the cross entropy": ("tensor_parallel.py", "dist.all_reduce(sums, group=group)", "pass", TP, {}),
    "gradient of the loss not divided by the tokens": (
        "tensor_parallel.py", "grad_loss / grad_logits.size(0)", "grad_loss", TP, {},
    ),
    "two ranks take each other's shard": (
        "tensor_parallel.py", "*shard_range(full.size(dim), rank, num_shards)",
        "*shard_range(full.size(dim), num_shards - 1 - rank, num_shards)", TP, {},
    ),
    "dp groups along the wrong axis": (
        "process_group_manager.py", "grid.permute(1, 2, 0).reshape(-1, dp_size)", "grid.reshape(-1, dp_size)",
        (2, 1, 2), {},
    ),
}  # fmt: skip


like_float32 = test_bfloat16.test_layout_trains_like_float32_but_for_rounding
same_again = test_bfloat16.test_eight_times_the_same_micro_batch_is_that_micro_batch
PUBLISH, READY = "mine.copy_(self.master)", "self.arrived += 1"
START = 'assert self.work is None, "a bucket is reduced once a step"'
BFLOAT16_MUTATIONS = {  # what is there, a line that comes after it, a layout and a test that has to fail on it
    "no float32 master weights": (PUBLISH, "self.master.copy_(mine)", (1, 1, 1), like_float32),
    "no float32 master weights, zero1": (PUBLISH, "self.master.copy_(mine)", DP, like_float32),
    "gradients summed in bfloat16": (
        READY, "_parameter.grad.copy_(_parameter.grad.bfloat16())",
        (1, 1, 1), functools.partial(same_again, options={}),
    ),
    "gradients of W summed in bfloat16": (
        READY, "_parameter.grad.copy_(_parameter.grad.bfloat16())",
        PP, functools.partial(same_again, options=dict(engine="zb_h1")),
    ),
    "all-reduce over dp in bfloat16": (START, "self.gradients.copy_(self.gradients.bfloat16())", DP, like_float32),
}  # fmt: skip


def import_from(folder, file):
    """On a rank: from now on the project's modules are loaded anew, from `folder` where it has them."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.parent in (ROOT, ROOT / "tests") and name != "workers":
            del sys.modules[name]
    sys.path.insert(0, folder)
    sys.modules["workers"].pgm = importlib.import_module("process_group_manager")
    return importlib.import_module(Path(file).stem).__file__


def on_changed_ranks(folder, file, old, new, layout, test):
    """Runs `test(pool, layout)` on ranks where `new` stands in `file` for `old`."""
    source = (ROOT / file).read_text()
    assert source.count(old) == 1, "the mutation no longer fits the source"
    (folder / file).write_text(source.replace(old, new))
    pool = WorkerPool()
    try:
        assert set(pool.run(math.prod(layout), import_from, str(folder), file)) == {str(folder / file)}
        test(pool, layout)
    finally:
        pool.close()


def train_like_plain_pytorch(pool, layout, options):
    """As test_layouts.py has it with this layout and options, untied and tied."""
    size = dict(num_hidden_layers=2, vocab_size=64, microbatches=2 * layout[2])
    check(pool, layout, [(problem | size, options) for problem in (PROBLEMS[0], PROBLEMS[-1])])


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fails_the_test_of_its_layout(name, tmp_path):
    *change, layout, options = MUTATIONS[name]
    with pytest.raises(AssertionError, match="off, of|ranks report different|two ranks disagree"):
        on_changed_ranks(tmp_path, *change, layout, functools.partial(train_like_plain_pytorch, options=options))


@pytest.mark.parametrize("name", BFLOAT16_MUTATIONS)
def test_a_mutation_fails_a_test_of_bfloat16(name, tmp_path):
    old, line, layout, test = BFLOAT16_MUTATIONS[name]
    with pytest.raises(AssertionError, match="assert"):
        on_changed_ranks(tmp_path, "data_parallel.py", old, f"{old}; {line}", layout, test)


@pytest.mark.parametrize("layout, options", [(TP, SEQUENCE_PARALLEL), (DP, ZERO1), (PP, {})], ids=str)
def test_the_same_without_a_mutation_passes(layout, options, tmp_path):
    for file in {file for file, *_ in MUTATIONS.values()}:
        (tmp_path / file).write_text((ROOT / file).read_text())
    test = functools.partial(train_like_plain_pytorch, options=options)
    on_changed_ranks(tmp_path, "data_parallel.py", READY, READY, layout, test)
