"""Pipeline parallelism alone changes no bit: loss, gradients and trained weights of every schedule equal one process's.

Untied and unclipped: tied weights and the norm are sums in another order, see test_layouts.py. Every case of one number
of ranks runs in one go on the same processes.
"""

import pytest
import torch

from layouts import assemble, assert_close, assert_equal, run, tiny_config, train_on_layout, train_plainly

ENGINES = [("afab", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zb_v", 2), ("dualpipev", 2)]
CONFIG = tiny_config(num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1)
DEEP = tiny_config(num_hidden_layers=16, num_attention_heads=2, num_key_value_heads=1)  # for 8 ranks with 2 chunks each


def train_many(pp, cases):
    return [train_on_layout(pp=pp, **{"config": CONFIG, **case}) for case in cases]


def run_many(pool, pp, cases):
    """The result of every case on `pp` ranks: losses, gradients, weights after the last step."""
    by_rank = pool.run(pp, train_many, pp, cases)
    for results in zip(*by_rank, strict=True):
        yield {"losses": results[0]["losses"]} | {
            key: assemble([result[key] for result in results]) for key in ("initial", "gradients", "final")
        }


@pytest.fixture(scope="module")
def one_process(pool):
    """One process's runs by (micro-batches, dtype), each made once."""
    known = {}

    def of(microbatches, dtype):
        if (microbatches, dtype) not in known:
            case = dict(microbatches=microbatches, dtype=dtype, engine="afab")
            known[microbatches, dtype] = next(run_many(pool, 1, [case]))
        return known[microbatches, dtype]

    return of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "pp, engine, chunks", [(pp, *e) for pp in (1, 2, 4) for e in ENGINES] + [(2, "interleaved_1f1b", 4)]
)
def test_schedule_is_bit_equal_to_one_process(pool, one_process, pp, engine, chunks, dtype):
    numbers = range(1, 3 * pp + 1)
    cases = [dict(engine=engine, chunks=chunks, microbatches=m, dtype=dtype) for m in numbers]
    for microbatches, result in zip(numbers, run_many(pool, pp, cases), strict=True):
        assert_equal(result, one_process(microbatches, dtype))


@pytest.mark.parametrize("engine, chunks", ENGINES)
def test_eight_ranks(pool, one_process, engine, chunks):
    case = dict(engine=engine, chunks=chunks, microbatches=6, dtype=torch.float64, config=DEEP)
    assert_equal(*(next(run_many(pool, pp, [case])) for pp in (8, 1)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("engine, chunks", ENGINES)
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2), (2, 1, 1)], ids=str)
def test_schedule_with_tensor_and_data_parallel(pool, layout, engine, chunks, tied):
    config = tiny_config(tie_word_embeddings=tied)
    result = run(
        pool, *layout, config=config, engine=engine, chunks=chunks, microbatches=4 // layout[2], steps=3, clip=0.1
    )
    assert_close(result, train_plainly(config, 4, steps=3, clip=0.1), 1e-12)


def test_a_schedule_of_ones_own_is_bit_equal_too(pool, one_process, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from schedules import F, I, W\n"
        "def late_weights(pp_rank, pp_size, num_microbatches):\n"
        "    one_by_one = [action(i) for i in range(num_microbatches) for action in (F, I)]\n"
        "    return one_by_one + [W(i) for i in range(num_microbatches)]\n"
    )
    case = dict(engine=f"{path}:late_weights", microbatches=5, dtype=torch.float64)
    assert_equal(next(run_many(pool, 2, [case])), one_process(5, torch.float64))
