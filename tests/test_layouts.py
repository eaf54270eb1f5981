"""Every layout trains like plain PyTorch: losses, gradient norms, gradients and weights after three AdamW steps.

float64, so that 1e-12 tells a different order of summation from a mistake. `layouts.py` holds the runs. A test takes
all its cases of one layout to the same processes at once; what fails names its case.
"""

import itertools

import pytest

from layouts import MICRO_BATCH_SIZE, SEQ_LENGTH, assert_close, assert_equal, on_layout, plain, run_cases

TOLERANCE = 1e-12
CUBE = list(itertools.product((1, 2), (1, 2), (1, 2)))  # tp, pp, dp
PROBLEMS = [
    dict(tie_word_embeddings=tied, num_key_value_heads=4, steps=3, clip=clip)
    for tied in (False, True)
    for clip in (None, 0.1)
]


def check(pool, layout, cases):
    """Cases: (problem, options). The problem is plain PyTorch's as well; options of the layout may change no number."""
    results = run_cases(pool, layout, [on_layout(layout, **problem) | options for problem, options in cases])
    for (problem, options), result in zip(cases, results, strict=True):
        what = f"{layout} {problem} {options}:"
        expected = plain(**problem)
        assert_equal(result["initial"], expected["initial"], what)  # invariant 1: layout changes no bit of a weight
        assert_close(result, expected, TOLERANCE, what)


@pytest.mark.parametrize("layout", [*CUBE, (1, 4, 1)], ids=str)
def test_layout_trains_like_plain_pytorch(pool, layout):
    check(pool, layout, [(problem, dict(engine=engine)) for engine in ("afab", "1f1b") for problem in PROBLEMS])


@pytest.mark.parametrize("layout", [(4, 1, 1), (1, 1, 4), (2, 4, 1)], ids=str)
def test_four_ranks_along_any_axis(pool, layout):
    check(pool, layout, [(PROBLEMS[-1], {})])


OPTIONS = {
    "zero1": dict(zero1=True),
    "sequence parallel": dict(sequence_parallel=True),
    "recompute": dict(recompute_every=1),
    "recompute every 2nd": dict(recompute_every=2),
    "logits in pieces": dict(logits_bytes=2000),
    "explicit layer counts": dict(pp_layers=[2, 0]),
}
AXIS = {"sequence parallel": 0, "explicit layer counts": 1, "zero1": 2}  # the one that an option is about


@pytest.mark.parametrize("layout", CUBE, ids=str)
def test_options_and_their_pairs_change_no_number(pool, layout):
    """Each option alone, and two together where the layout has what both are about. Many runs: two layers will do."""
    alone = [options for name, options in OPTIONS.items() if layout[1] == 2 or name != "explicit layer counts"]
    useful = [options for name, options in OPTIONS.items() if name not in AXIS or layout[AXIS[name]] == 2]
    pairs = [one | other for one, other in itertools.combinations(useful, 2) if not one.keys() & other.keys()]
    clipped = [
        problem | dict(num_hidden_layers=2, microbatches=2 * layout[2]) for problem in PROBLEMS if problem["clip"]
    ]
    cases = [(problem, options) for problem in clipped for options in alone]
    cases += [(problem | dict(steps=2), options) for problem in clipped for options in pairs]
    check(pool, layout, cases)


@pytest.mark.parametrize("engine, chunks", [("1f1b", 1), ("zb_v", 2)])
def test_all_options_on_eight_ranks(pool, engine, chunks):
    options = {key: value for option in OPTIONS.values() for key, value in option.items() if key != "pp_layers"}
    check(pool, (2, 2, 2), [(PROBLEMS[-1], options | dict(engine=engine, chunks=chunks))])


def test_explicit_layer_counts(pool):
    cases = [(PROBLEMS[0], dict(pp_layers=pp_layers)) for pp_layers in ([3, 1], [1, 3], [4, 0], [0, 4])]
    check(pool, (1, 2, 1), cases)


@pytest.mark.parametrize("num_layers, pp", [(5, 2), (5, 4), (7, 4)])
def test_layers_that_pp_does_not_divide(pool, num_layers, pp):
    check(pool, (1, pp, 1), [(dict(num_hidden_layers=num_layers), {})])


def test_gradients_do_not_grow_with_accumulation(pool):
    problems = [dict(microbatches=microbatches) for microbatches in (1, 2, 3, 4, 5, 8)]
    check(pool, (1, 2, 1), [(problem, dict(engine=engine)) for engine in ("afab", "1f1b") for problem in problems])


def test_vocabulary_smaller_shards_and_biases(pool):
    problem = dict(
        vocab_size=7, attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True, steps=2, clip=0.1
    )
    # The last rank has one row of 7, the others 2: one row's logits would be one piece, but all must cut into two.
    options = [{}, dict(sequence_parallel=True), dict(logits_bytes=4 * MICRO_BATCH_SIZE * SEQ_LENGTH)]
    check(pool, (4, 1, 1), [(problem, of_run) for of_run in options])
