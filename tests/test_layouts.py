"""Every layout trains like plain PyTorch: losses, gradient norms, gradients and weights after three AdamW steps.

float64, so that 1e-12 tells a different order of summation from a mistake. `layouts.py` holds the runs.
"""

import itertools

import pytest

from layouts import assert_close, assert_equal, run, tiny_config, train_plainly

TOLERANCE = 1e-12
LAYOUTS = [*itertools.product((1, 2), (1, 2), (1, 2)), (1, 4, 1)]
GLOBAL_MICROBATCHES = 4


@pytest.fixture(scope="module")
def plain():
    """Plain runs by (tied, clip), each made once."""
    runs = {}

    def of(tied, clip):
        if (tied, clip) not in runs:
            config = tiny_config(tie_word_embeddings=tied, num_key_value_heads=4)
            runs[tied, clip] = train_plainly(config, GLOBAL_MICROBATCHES, steps=3, clip=clip)
        return runs[tied, clip]

    return of


def run_like_plain(pool, layout, tied, clip, **options):
    config = tiny_config(tie_word_embeddings=tied, num_key_value_heads=4)
    microbatches = GLOBAL_MICROBATCHES // layout[2]
    return run(pool, *layout, config=config, microbatches=microbatches, steps=3, clip=clip, **options)


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("engine", ["afab", "1f1b"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_trains_like_plain_pytorch(pool, plain, layout, engine, tied, clip):
    result = run_like_plain(pool, layout, tied, clip, engine=engine)
    expected = plain(tied, clip)
    assert_equal(result["initial"], expected["initial"])  # invariant 1: layout changes no bit of a weight
    assert_close(result, expected, TOLERANCE)


@pytest.mark.parametrize("layout", [(4, 1, 1), (1, 1, 4), (2, 4, 1)], ids=str)
def test_four_ranks_along_any_axis(pool, plain, layout):
    assert_close(run_like_plain(pool, layout, True, 0.1), plain(True, 0.1), TOLERANCE)


OPTIONS = {
    "zero1": dict(zero1=True),
    "sequence parallel": dict(sequence_parallel=True),
    "recompute": dict(recompute_every=1),
    "logits in pieces": dict(logits_bytes=2000),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(OPTIONS, 2)), ids=" and ".join)
@pytest.mark.parametrize("layout", [(2, 2, 1), (2, 1, 2), (1, 2, 2)], ids=str)
def test_options_and_their_pairs_change_no_number(pool, plain, layout, pair, tied):
    options = {**OPTIONS[pair[0]], **OPTIONS[pair[1]]}
    assert_close(run_like_plain(pool, layout, tied, 0.1, **options), plain(tied, 0.1), TOLERANCE)


@pytest.mark.parametrize("engine", ["1f1b", "zb_v"])
def test_all_options_on_eight_ranks(pool, plain, engine):
    options = {key: value for option in OPTIONS.values() for key, value in option.items()}
    chunks = 2 if engine == "zb_v" else 1
    result = run_like_plain(pool, (2, 2, 2), True, 0.1, engine=engine, chunks=chunks, **options)
    assert_close(result, plain(True, 0.1), TOLERANCE)


@pytest.mark.parametrize("pp_layers", [[3, 1], [1, 3], [4, 0], [0, 4]], ids=str)
def test_explicit_layer_counts(pool, plain, pp_layers):
    result = run_like_plain(pool, (1, 2, 1), False, None, pp_layers=pp_layers)
    assert_close(result, plain(False, None), TOLERANCE)


@pytest.mark.parametrize("num_layers, pp", [(5, 2), (5, 4), (7, 4)])
def test_layers_that_pp_does_not_divide(pool, num_layers, pp):
    config = tiny_config(num_hidden_layers=num_layers)
    assert_close(run(pool, 1, pp, 1, config=config), train_plainly(config), TOLERANCE)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 8])
def test_gradients_do_not_grow_with_accumulation(pool, microbatches):
    config = tiny_config()
    for engine in ("afab", "1f1b"):
        result = run(pool, 1, 2, 1, config=config, engine=engine, microbatches=microbatches)
        assert_close(result, train_plainly(config, microbatches), TOLERANCE)


def test_vocabulary_smaller_shards_and_biases(pool):
    config = tiny_config(vocab_size=7, attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True)
    expected = train_plainly(config, steps=2, clip=0.1)
    for sequence_parallel in (False, True):
        result = run(pool, 4, 1, 1, config=config, steps=2, clip=0.1, sequence_parallel=sequence_parallel)
        assert_close(result, expected, TOLERANCE)
