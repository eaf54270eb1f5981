"""Pipeline parallelism alone changes no bit: loss, gradients and trained weights of every schedule equal one process's.

Untied and unclipped: tied weights and the norm are sums in another order, see test_layouts.py. Every case of one number
of ranks runs in one go on the same processes.
"""

import functools

import pytest
import torch

from find_schedule import chunks_of
from layouts import assert_close, assert_equal, on_layout, plain, run_cases, tiny_config
from schedules import SCHEDULES

ENGINES = [(name, chunks_of(schedule) or 2) for name, schedule in SCHEDULES.items()]
CONFIG = tiny_config(num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1)
DEEP = tiny_config(num_hidden_layers=16, num_attention_heads=2, num_key_value_heads=1)  # for 8 ranks with 2 chunks each


def train(pool, pp, cases):
    """The result of every case on `pp` ranks: losses, gradients, weights after the step."""
    for result in run_cases(pool, (1, pp, 1), [{"config": CONFIG, **case} for case in cases]):
        del result["norms"]
        yield result


@pytest.fixture(scope="module")
def one_process(pool):
    """One process's runs by (micro-batches, dtype), each made once."""

    @functools.cache
    def of(microbatches, dtype):
        return next(train(pool, 1, [dict(microbatches=microbatches, dtype=dtype, engine="afab")]))

    return of


@pytest.mark.parametrize(
    "pp, engine, chunks", [(pp, *e) for pp in (1, 2, 4) for e in ENGINES] + [(2, "interleaved_1f1b", 4)]
)
def test_schedule_is_bit_equal_to_one_process(pool, one_process, pp, engine, chunks):
    """Any number of micro-batches in float64; in float32 fewer, equal to and more than the ranks."""
    numbers = [(torch.float64, m) for m in range(1, 3 * pp + 1)]
    numbers += [(torch.float32, m) for m in sorted({max(1, pp - 1), pp, 2 * pp + 1})]
    cases = [dict(engine=engine, chunks=chunks, microbatches=m, dtype=dtype) for dtype, m in numbers]
    for (dtype, microbatches), result in zip(numbers, train(pool, pp, cases), strict=True):
        assert_equal(result, one_process(microbatches, dtype), f"{microbatches} micro-batches in {dtype}:")


def test_eight_ranks(pool):
    common = dict(microbatches=6, dtype=torch.float64, config=DEEP)
    expected = next(train(pool, 1, [dict(engine="afab", **common)]))
    cases = [dict(engine=engine, chunks=chunks, **common) for engine, chunks in ENGINES]
    for (engine, _), result in zip(ENGINES, train(pool, 8, cases), strict=True):
        assert_equal(result, expected, f"{engine}:")


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)], ids=str)
def test_schedule_with_tensor_and_data_parallel(pool, layout):
    """Those that split backward or a rank's layers; for the other two see test_layouts.py."""
    problems = [dict(tie_word_embeddings=tied, steps=3, clip=0.1) for tied in (False, True)]
    cases = [(problem, *engine) for engine in ENGINES[2:] for problem in problems]
    options = [on_layout(layout, **problem) | dict(engine=engine, chunks=chunks) for problem, engine, chunks in cases]
    for (problem, engine, _), result in zip(cases, run_cases(pool, layout, options), strict=True):
        assert_close(result, plain(**problem), 1e-12, f"{engine} {problem}:")


def test_a_schedule_of_ones_own_is_bit_equal_too(pool, one_process, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from schedules import F, I, W\n"
        "def late_weights(pp_rank, pp_size, num_microbatches):\n"
        "    one_by_one = [action(i) for i in range(num_microbatches) for action in (F, I)]\n"
        "    return one_by_one + [W(i) for i in range(num_microbatches)]\n"
    )
    case = dict(engine=f"{path}:late_weights", microbatches=5, dtype=torch.float64)
    assert_equal(next(train(pool, 2, [case])), one_process(5, torch.float64))
