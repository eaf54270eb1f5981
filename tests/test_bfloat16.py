"""bfloat16 models with float32 gradients and master weights, on every layout, against plain PyTorch in float32.

The reference starts from the same weights (rounded to bfloat16, then float32) and rounds nothing afterwards. A bfloat16
number has 8 bits: rounding changes it by at most u = 2^-8 of its size, 0.4 u in the mean square. How far apart that
takes two runs, is not a matter of taste:

GRADIENTS. On its way forward a value is rounded 12 times in a layer (after norm, projection, rotary embedding,
attention, output projection, sum, and as often in the MLP), twice more where tp ranks round what they add; as often on
its way back. Errors of independent signs add up as the root of their number. So a gradient is off, in norm, by about
e = 0.4 u √(28 layers + 8), 1.7 % for 4 layers: by 2 e at most for all parameters together (measured: 2.4 %), by 3 e for
one of them (3.4 % in a key projection, whose gradient is a difference of larger numbers). Norms, because a single
element may be 0.

STEPS. Adam's step is lr · m / √v, at most lr in size whatever the gradients are. So after n steps no weight is more
than 2 n lr from the reference's. That is the distance of a weight that always went the other way; most do not. In the
first step each moves by lr · sign(g), and noise e times as large as the gradient turns arctan(e) / π of the signs of a
normal distribution. Each of these is 2 lr off, so of the distance travelled the runs are 2 √(e / π) apart, in norm over
all weights: 21 % for 2 e as above. (Measured: 10 %.) Without master weights half of each step would be
rounded away: the spacing of bfloat16 numbers around 0.2, as weights are here, is 0.001, as large as lr.

LAYOUTS. pp, dp, ZeRO-1 and recomputation move the same bfloat16 numbers and sum gradients in float32: nothing differs
from one process (with tp: from tp alone) but the order of that sum, 1e-6. This tells a gradient summed in bfloat16,
which the other bounds let pass, from a right one.
"""

import functools
import itertools
import math

import pytest
import torch

from layouts import RandomMicroBatches, on_layout, run_cases, tiny_config, train_cases, train_plainly

BFLOAT16 = dict(dtype=torch.bfloat16)
U = 2.0**-8
NUM_LAYERS, GLOBAL_MICROBATCHES, STEPS, LR = 4, 2, 3, 0.001
ERROR = 0.4 * U * math.sqrt(28 * NUM_LAYERS + 8)
CUBE = list(itertools.product((1, 2), (1, 2), (1, 2)))  # tp, pp, dp
ALL_OPTIONS = dict(zero1=True, sequence_parallel=True, recompute_every=1, logits_bytes=2000)
SAME_BITS = dict(zero1=True, recompute_every=1)  # these do not touch a bfloat16 number


def problem(tied):
    return dict(num_key_value_heads=4, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=tied)


@functools.cache
def reference(tied):
    """Float32 from bfloat16's weights on."""
    options = dict(dtype=torch.float32, rounded_to=torch.bfloat16, lr=LR)
    return train_plainly(tiny_config(**problem(tied)), GLOBAL_MICROBATCHES, STEPS, **options)


def distance(ours, theirs):
    """‖ours − theirs‖ / ‖theirs‖ over all tensors together."""
    return math.sqrt(
        sum((ours[name].double() - theirs[name].double()).square().sum() for name in theirs)
        / sum(tensor.double().square().sum() for tensor in theirs.values())
    )


def each_distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    return {name: distance({name: ours[name]}, {name: theirs[name]}) for name in theirs}


def train(pool, layout, cases):
    """The result of each case (tied, options) on the layout."""
    common = [on_layout(layout, GLOBAL_MICROBATCHES, STEPS, **problem(tied)) | BFLOAT16 for tied, _ in cases]
    return run_cases(pool, layout, [case | options for case, (_, options) in zip(common, cases, strict=True)])


@functools.cache
def tp_alone(pool, tp):
    """The results, untied and tied, of tp and nothing else."""
    return list(train(pool, (tp, 1, 1), [(False, {}), (True, {})]))


@pytest.mark.parametrize("layout", CUBE, ids=str)
def test_layout_trains_like_float32_but_for_rounding(pool, layout):
    cases = [(False, {}), (True, SAME_BITS), (False, ALL_OPTIONS), (True, ALL_OPTIONS)]  # (tied, options)
    for (tied, options), result in zip(cases, train(pool, layout, cases), strict=True):
        check_against_float32(result, reference(tied))
        if options != ALL_OPTIONS:
            alone = tp_alone(pool, layout[0])[tied]
            assert max(each_distance(result["gradients"], alone["gradients"]).values()) < 1e-6
            assert result["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)


def check_against_float32(result, expected):
    assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=U)  # a mean of 64 tokens' errors
    assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=2 * ERROR)
    assert distance(result["gradients"], expected["gradients"]) < 2 * ERROR
    gradients = each_distance(result["gradients"], expected["gradients"])
    assert max(gradients.values()) < 3 * ERROR, max(gradients, key=gradients.get)
    travelled, expected_travelled = {}, {}
    for name, start in expected["initial"].items():
        assert torch.equal(result["initial"][name].float(), start), name
        assert torch.equal(result["final"][name], result["masters"][name].bfloat16()), name
        travelled[name] = result["masters"][name] - start
        expected_travelled[name] = expected["final"][name] - start
        assert (travelled[name] - expected_travelled[name]).abs().max() <= 2.01 * STEPS * LR, name  # .01: weight decay
    assert distance(travelled, expected_travelled) < 2 * math.sqrt(2 * ERROR / math.pi)


class OneMicroBatchAgainAndAgain(RandomMicroBatches):
    def __getitem__(self, microbatch):
        batches = RandomMicroBatches(self.vocab_size, 1)
        batches.step = self.step
        return batches[0]


@pytest.mark.parametrize(
    "layout, options",
    [
        ((1, 1, 1), {}),
        ((1, 2, 1), dict(engine="zb_h1")),  # weight gradients that W adds
        ((2, 1, 1), dict(sequence_parallel=True)),
        ((1, 1, 2), dict(zero1=True)),
    ],
    ids=str,
)
def test_eight_times_the_same_micro_batch_is_that_micro_batch(pool, layout, options):
    """Eight equal numbers of 8 bits, divided by 8, add up to themselves in float32; in bfloat16 sums are rounded."""
    common = options | BFLOAT16 | dict(config=tiny_config(num_hidden_layers=2), lr=LR)
    cases = [common | dict(microbatches=n, micro_batches_of=OneMicroBatchAgainAndAgain) for n in (1, 8)]
    once, eight_times = run_cases(pool, layout, cases)
    assert eight_times["losses"] == pytest.approx(once["losses"], rel=1e-6)
    assert max(each_distance(eight_times["gradients"], once["gradients"]).values()) < 1e-6


SMALL_WEIGHTS = dict(num_hidden_layers=2, initializer_range=0.02)


@functools.cache
def small_steps_in_float32():
    config = tiny_config(**SMALL_WEIGHTS)
    return train_plainly(config, 2, 100, dtype=torch.float32, rounded_to=torch.bfloat16, lr=1e-5)


@pytest.mark.parametrize("layout, options", [((1, 1, 1), {}), ((1, 2, 2), dict(zero1=True))], ids=str)
def test_small_steps_move_as_many_weights_as_in_float32(pool, layout, options):
    """100 steps of 1e-5; none of them gets halfway from one bfloat16 number around 0.02 to the next, 1.2e-4 away."""
    case = on_layout(layout, 2, 100, **SMALL_WEIGHTS) | BFLOAT16 | options | dict(lr=1e-5)
    (result,), expected = run_cases(pool, layout, [case]), small_steps_in_float32()
    start = expected["initial"]
    in_float32 = share_that_moved(start, expected["final"])
    assert in_float32 > 0.99
    assert share_that_moved(start, result["masters"]) == pytest.approx(in_float32, abs=0.01)
    rounded = {name: tensor.bfloat16() for name, tensor in expected["final"].items()}
    assert share_that_moved(start, result["final"]) == pytest.approx(share_that_moved(start, rounded), abs=0.02)


def share_that_moved(start, end):
    """Of the matrices' elements. (Norm weights are 1: there 100 such steps together do not show in bfloat16.)"""
    moved = [(end[name] != tensor).flatten() for name, tensor in start.items() if tensor.ndim > 1]
    return torch.cat(moved).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tp", [2, 4])
def test_norm_weights_stay_bit_equal_on_tp_ranks_with_sequence_parallelism(pool, tp, dtype):
    config = dict(num_hidden_layers=2, num_key_value_heads=4)
    case = on_layout((tp, 1, 1), 2, 3, **config) | dict(sequence_parallel=True, dtype=dtype)
    expected = train_plainly(tiny_config(**config), 2, 3, dtype=torch.float32)
    of_ranks = [results[0] for results in pool.run(tp, train_cases, (tp, 1, 1), [case])]
    names = [name for name in of_ranks[0]["masters"] if name.endswith("norm.weight")]
    assert len(names) == 2 * 2 + 1
    for name in names:
        first = of_ranks[0]["masters"][name][0]
        assert all(torch.equal(result["masters"][name][0], first) for result in of_ranks)
        assert all(torch.equal(result["final"][name][0], of_ranks[0]["final"][name][0]) for result in of_ranks)
        bound = 1e-5 if dtype == torch.float32 else 2.01 * 3 * LR
        assert (first - 1).abs().max() > LR and (first - expected["final"][name]).abs().max() <= bound
