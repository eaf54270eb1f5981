"""`train.py --verify` says OK where the code is right, and names the fault where a test has broken it on purpose.

A fault is a function (patch, model) that runs on every rank of the layout, after the model was built.
"""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parallel_region
import process_group_manager as pgm
import train
from data_parallel import Bucket, DataParallelBucket
from pipeline_parallel import PipelineExecutor
from read_config import load_config
from token_file import prepare_tokens
from verify import verify

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs/tiny_pp2_tp2.json"
UP_PROJ = "decoder_layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Overrides that make the tiny configuration smaller still; float64, and a text of its own."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(300)))
    return [
        "model.hidden_size=32", "model.intermediate_size=48", "model.dtype=float64", "training.seq_length=16",
        "training.micro_batch_size=1", f'dataset.files=["{folder}/text.txt"]', f"dataset.cache_dir={folder}",
    ]  # fmt: skip


def verify_on_this_rank(overrides, fault):
    config = load_config(str(CONFIG), overrides)
    train.settle_layout(config, int(os.environ["WORLD_SIZE"]))
    distributed, device = config.distributed, torch.device("cpu")
    pgm.setup_process_group_manager(distributed.tp_size, distributed.pp_size, distributed.dp_size)
    data = train.make_loader(config, prepare_tokens(config.dataset), device, config.dataset.shuffle)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        model = train.build_model(config, device)
        if fault:
            fault(patch, model)
        exit_code = verify(config, model, data, device)
    return exit_code, printed.getvalue()


def run(pool, small, tp=1, pp=1, dp=1, fault=None, **keys):
    """The exit code that all ranks agree on, and what rank 0 prints."""
    sizes = [f"distributed.tp_size={tp}", f"distributed.pp_size={pp}", f"distributed.dp_size={dp}"]
    overrides = small + sizes + [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    (exit_code, printed), *others = pool.run(tp * pp * dp, verify_on_this_rank, overrides, fault)
    assert all(other == (exit_code, "") for other in others)
    return exit_code, printed


TIED = dict(model__tie_word_embeddings="true")
ZERO1 = dict(distributed__zero1="true")
SEQUENCE_PARALLEL = dict(distributed__sequence_parallel="true")


@pytest.mark.parametrize(
    "layout, keys",
    [
        ((1, 1, 1), {}),
        ((2, 2, 1), TIED),
        ((2, 1, 2), TIED | ZERO1 | SEQUENCE_PARALLEL | dict(model__recompute="layer", model__attention_bias="true")),
        ((1, 2, 1), dict(distributed__pp_engine="zb_v", **TIED)),
        ((2, 2, 1), dict(distributed__pp_engine="interleaved_1f1b", model__dtype="float32")),
        ((1, 2, 2), dict(distributed__pp_engine="zb_h1", training__gradient_accumulation_steps=1)),
        ((2, 1, 2), dict(model__dtype="bfloat16", **SEQUENCE_PARALLEL)),
        ((1, 2, 1), dict(training__seq_length=1)),  # with nothing to attend to, q and k have no gradient
    ],
    ids=str,
)
def test_right_code_is_ok(pool, small, layout, keys):
    exit_code, printed = run(pool, small, *layout, **keys)
    assert printed.endswith("  ok\nOK\n") and exit_code == 0
    tied, biased = "model__tie_word_embeddings" in keys, "model__attention_bias" in keys
    assert f"\n{39 - tied + 16 * biased} gradients compared" in printed


# --- faults -----------------------------------------------------------------------------------------------------------


def loss_not_divided(patch, model):
    """The usual mistake: what is logged is divided by the number of micro-batches, what is differentiated is not."""
    forward = PipelineExecutor.forward

    def undivided(run, kind, chunk, microbatch):
        num_microbatches, run.num_microbatches = run.num_microbatches, 1
        forward(run, kind, chunk, microbatch)
        run.num_microbatches = num_microbatches
        if model.is_last(chunk):
            run.losses[microbatch] /= num_microbatches

    patch.setattr(PipelineExecutor, "forward", undivided)


def division_left_out(patch, model):
    forward = PipelineExecutor.forward

    def undivided(run, kind, chunk, microbatch):
        run.num_microbatches = 1
        forward(run, kind, chunk, microbatch)

    patch.setattr(PipelineExecutor, "forward", undivided)


def dp_division_left_out(patch, model):
    finish_grad_sync = Bucket.finish_grad_sync

    def undivided(bucket):
        bucket.dp_size = 1
        finish_grad_sync(bucket)

    patch.setattr(Bucket, "finish_grad_sync", undivided)


class Nothing:
    def wait(self):
        pass


def dp_sum_left_out(patch, model):
    patch.setattr(Bucket, "start_grad_sync", lambda bucket: setattr(bucket, "work", Nothing()))


def dp_sum_one_gradient_too_early(patch, model):
    """From the second step on, as the first one only counts: a bucket's last gradient comes after its sum over dp."""

    def on_grad_ready(bucket, parameter):
        bucket.arrived += 1
        if bucket.expected and bucket.arrived == bucket.expected - 1:
            bucket.start_grad_sync()
            bucket.work.wait()
            bucket.work = Nothing()

    patch.setattr(Bucket, "on_grad_ready", on_grad_ready)


def f_left_out(patch, model):
    def backward(ctx, grad):
        ctx.region.compute_put_aside()
        return grad, None

    patch.setattr(parallel_region._CopyToTensorParallel, "backward", staticmethod(backward))


def partial_gradients_not_summed(patch, model):
    for parameter in model.parameters():
        parameter.partial_over_tp = False


def tied_gradients_not_summed(patch, model):
    for parameter in model.parameters():
        parameter.has_copy = False


def layers_run_in_another_order(patch, model):
    model.layers[0] = model.layers[0][::-1]


def layers_swapped(patch, model):
    if 0 in model.stages:
        layers = model.decoder_layers
        layers["0"], layers["1"] = layers["1"], layers["0"]


def scale(patch, model, factor, choose):
    """Multiplies the gradients that backward leaves in the parameters whose names are chosen."""
    original = PipelineExecutor.run

    def run_and_scale(run, program):
        loss = original(run, program)
        for name, parameter in run.model.named_parameters() if run.model is model else ():
            if choose(name):
                parameter.grad.mul_(factor)
        return loss

    patch.setattr(PipelineExecutor, "run", run_and_scale)


def stage_1_gets_nothing(patch, model):
    if 1 in model.stages:
        scale(patch, model, 0, lambda name: True)


def stage_1_gets_nan(patch, model):
    if 1 in model.stages:
        scale(patch, model, float("nan"), lambda name: True)


def one_weight_scaled(patch, model):
    scale(patch, model, 3, lambda name: name == UP_PROJ)


def one_weight_off_by_a_thousandth(patch, model):
    scale(patch, model, 1.001, lambda name: name == UP_PROJ)


def one_kind_turned(patch, model):
    scale(patch, model, -1, lambda name: name.endswith("q_proj.weight"))


def micro_batch_1_of_stage_0_lost(patch, model):
    backward = PipelineExecutor.backward

    def forgetful(run, kind, chunk, microbatch):
        kept = [parameter.grad.clone() for parameter in model.parameters()]
        backward(run, kind, chunk, microbatch)
        if microbatch == 1 and model.is_first(chunk):
            for parameter, gradient in zip(model.parameters(), kept, strict=True):
                parameter.grad.copy_(gradient)

    patch.setattr(PipelineExecutor, "backward", forgetful)


def norm_doubled(patch, model):
    clip_gradients = DataParallelBucket.clip_gradients
    patch.setattr(DataParallelBucket, "clip_gradients", lambda buckets, norm: 2 * clip_gradients(buckets, norm))


def stages_1_to_3_times_4(patch, model):
    if 0 not in model.stages:
        scale(patch, model, 4, lambda name: True)


def norms_of_tp_rank_1_nudged(patch, model):
    if pgm.process_group_manager.tp_rank == 1:
        scale(patch, model, 1 + 1e-15, lambda name: name == "final_norm.weight")


NOT_FORWARD = "the loss is right: look at the backward pass first, and at sums of gradients over ranks"
FORWARD = "the loss is wrong: look at the forward pass first"
NO_FACTOR = "wrong, by no plain factor"
TP_SUM = "a sum over tp is missing in backward: f, or that of a parameter to be marked partial_over_tp"
NORMS = "decoder_layers.0.input_layernorm.weight, decoder_layers.0.post_attention_layernorm.weight, "
NORMS += "decoder_layers.1.input_layernorm.weight and 6 more"
FAULTS = [
    (loss_not_divided, (1, 4, 1), {}, [NOT_FORWARD, "all gradients are 4.00× too large: the number of micro-batches"]),
    (
        division_left_out,
        (1, 2, 1),
        dict(distributed__pp_engine="zb_v", training__gradient_accumulation_steps=3),
        [f"{what} 3.00× too large: the number of micro-batches" for what in ("the loss is", "all gradients are")],
    ),
    (
        dp_division_left_out,
        (1, 1, 2),
        dict(training__gradient_accumulation_steps=3, model__dtype="bfloat16", **ZERO1),
        [NOT_FORWARD, "all gradients are 2.00× too large: dp_size"],
    ),
    (
        dp_sum_left_out,
        (1, 2, 2),
        {},
        [
            "dp ranks differ in embedding.weight, decoder_layers.0.input_layernorm.weight, "
            "decoder_layers.0.attention.q_proj.weight and 36 more (rank 2 ≠ rank 0, rank 3 ≠ rank 1): "
            "the sum over dp is missing, or not complete",
            NOT_FORWARD,
            f"all gradients are {NO_FACTOR}",
            "the gradients of stages 0–1: micro-batches 0–3 of dp rank 1 missing",
        ],
    ),
    (
        dp_sum_one_gradient_too_early,
        (1, 1, 2),
        {},
        [
            "dp ranks differ in embedding.weight, decoder_layers.0.input_layernorm.weight (rank 1 ≠ rank 0): "
            "the sum over dp is missing, or not complete",
            NOT_FORWARD,
            f"the gradients of embedding.weight, decoder_layers.0.input_layernorm.weight are {NO_FACTOR}",
        ],
    ),
    (
        f_left_out,
        (2, 1, 1),
        {},
        [
            f"tp ranks differ in {NORMS} (rank 1 ≠ rank 0): {TP_SUM}",
            NOT_FORWARD,
            f"all gradients but final_proj.weight are {NO_FACTOR}",
        ],
    ),
    (
        partial_gradients_not_summed,
        (2, 1, 1),
        dict(model__dtype="float32", **SEQUENCE_PARALLEL),
        [
            f"tp ranks differ in {NORMS} (rank 1 ≠ rank 0): {TP_SUM}",
            NOT_FORWARD,
            "all gradients of final_norm.weight, input_layernorm.weight, post_attention_layernorm.weight are "
            f"{NO_FACTOR}",
        ],
    ),
    (
        tied_gradients_not_summed,
        (1, 2, 1),
        TIED,
        [
            "pp ranks differ in embedding.weight (rank 1 ≠ rank 0): copies of the tied embedding need the sum of both "
            "gradients, over the embedding group",
            NOT_FORWARD,
            f"the gradient of embedding.weight is {NO_FACTOR}",
            "the tied embedding has the gradient of its use as lookup alone: the other use's is missing",
        ],
    ),
    (layers_run_in_another_order, (1, 2, 1), {}, [FORWARD, f"all gradients are {NO_FACTOR}"]),
    (
        layers_swapped,
        (1, 2, 2),
        {},
        [
            "other initial weights than in one process, on ranks 0, 2: decoder_layers.0.attention.q_proj.weight, "
            "decoder_layers.0.attention.k_proj.weight, decoder_layers.0.attention.v_proj.weight and 11 more",
            FORWARD,
            f"all gradients are {NO_FACTOR}",
        ],
    ),
    (stage_1_gets_nothing, (1, 4, 1), {}, [NOT_FORWARD, "all gradients of stage 1 are 0: they never arrive"]),
    (
        stages_1_to_3_times_4,
        (1, 4, 1),
        {},
        [NOT_FORWARD, "all gradients of stages 1–3 are 4.00× too large: the number of micro-batches"],
    ),
    (
        stage_1_gets_nan,
        (1, 2, 1),
        {},
        ["NaN, infinity, or a part that no rank holds: all gradients of stage 1", NOT_FORWARD],
    ),
    (one_weight_scaled, (2, 2, 1), {}, [NOT_FORWARD, f"the gradient of {UP_PROJ} is 3.00× too large"]),
    (
        one_kind_turned,
        (1, 2, 1),
        {},
        [NOT_FORWARD, "all gradients of attention.q_proj.weight are of the wrong sign, -1.00×"],
    ),
    (
        micro_batch_1_of_stage_0_lost,
        (1, 2, 2),
        dict(training__gradient_accumulation_steps=3),
        [NOT_FORWARD, f"all gradients of stage 0 are {NO_FACTOR}"]
        + [f"the gradients of stage 0: micro-batch 1 of dp rank {rank} missing" for rank in (0, 1)],
    ),
    (
        norm_doubled,
        (2, 1, 1),
        {},
        ["every gradient is right, their norm is not: shards and stages add up, replicas and copies count once"],
    ),
    (
        norms_of_tp_rank_1_nudged,
        (2, 1, 1),
        {},
        [f"tp ranks differ in final_norm.weight (rank 1 ≠ rank 0): {TP_SUM}"],
    ),
]


@pytest.mark.parametrize("fault, layout, keys, expected", FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_fault_is_found_and_named(pool, small, fault, layout, keys, expected):
    exit_code, printed = run(pool, small, *layout, fault=fault, **keys)
    assert [line[2:] for line in printed.splitlines() if line.startswith("- ")] == expected
    assert printed.endswith("\nWRONG\n") and exit_code == 1


def test_small_difference_in_float32_may_be_rounding(pool, small):
    hint = "- a difference this small may be rounding: model.dtype=float64 tells\n"
    exit_code, printed = run(pool, small, fault=one_weight_off_by_a_thousandth, model__dtype="float32")
    assert f"- the gradient of {UP_PROJ} is {NO_FACTOR}\n{hint}WRONG\n" in printed and exit_code == 1
    exit_code, printed = run(pool, small, fault=one_weight_off_by_a_thousandth)
    assert f"- the gradient of {UP_PROJ} is {NO_FACTOR}\nWRONG\n" in printed and exit_code == 1


def test_from_the_command_line(small):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    command += ["--config", str(CONFIG), "--verify", "distributed.tp_size=1", *small]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("gradient norm: ") == 1 and result.stdout.endswith("\nOK\n")
