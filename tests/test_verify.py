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

import data_parallel
import process_group_manager as pgm
import tensor_parallel
import train
from config import load_config
from data import prepare_tokens
from data_parallel import Bucket, DataParallelBucket
from pipeline_parallel import ScheduleRun
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
        ((2, 2, 2), TIED | ZERO1 | SEQUENCE_PARALLEL | dict(model__recompute="layer", model__attention_bias="true")),
        ((1, 2, 1), dict(distributed__pp_engine="zb_v", **TIED)),
        ((2, 2, 1), dict(distributed__pp_engine="interleaved_1f1b", model__dtype="float32")),
        ((1, 2, 2), dict(distributed__pp_engine="zb_h1", training__gradient_accumulation_steps=1)),
        ((2, 1, 2), dict(model__dtype="bfloat16", **SEQUENCE_PARALLEL)),
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
    forward = ScheduleRun.forward

    def undivided(run, kind, chunk, microbatch):
        num_microbatches, run.num_microbatches = run.num_microbatches, 1
        forward(run, kind, chunk, microbatch)
        run.num_microbatches = num_microbatches
        if model.is_last(chunk):
            run.losses[microbatch] /= num_microbatches

    patch.setattr(ScheduleRun, "forward", undivided)


def division_left_out(patch, model):
    forward = ScheduleRun.forward

    def undivided(run, kind, chunk, microbatch):
        run.num_microbatches = 1
        forward(run, kind, chunk, microbatch)

    patch.setattr(ScheduleRun, "forward", undivided)


def dp_division_left_out(patch, model):
    finish_grad_sync = Bucket.finish_grad_sync

    def undivided(bucket):
        bucket.dp_size = 1
        finish_grad_sync(bucket)

    patch.setattr(Bucket, "finish_grad_sync", undivided)


def dp_sum_left_out(patch, model):
    class Nothing:
        def wait(self):
            pass

    patch.setattr(Bucket, "start_grad_sync", lambda bucket: setattr(bucket, "work", Nothing()))


def f_left_out(patch, model):
    patch.setattr(tensor_parallel._CopyToTensorParallel, "backward", staticmethod(lambda ctx, grad: (grad, None)))


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


def scale(model, factor, choose):
    for name, parameter in model.named_parameters():
        if choose(name):
            parameter.register_hook(lambda gradient: gradient * factor)


def stage_1_gets_nothing(patch, model):
    if 1 in model.stages:
        scale(model, 0, lambda name: True)


def stage_1_gets_nan(patch, model):
    if 1 in model.stages:
        scale(model, float("nan"), lambda name: True)


def one_weight_scaled(patch, model):
    scale(model, 3, lambda name: name == UP_PROJ)


def one_kind_turned(patch, model):
    scale(model, -1, lambda name: name.endswith("q_proj.weight"))


def micro_batch_1_of_stage_0_lost(patch, model):
    backward = ScheduleRun.backward

    def forgetful(run, kind, chunk, microbatch):
        kept = [parameter.grad.clone() for parameter in model.parameters()]
        backward(run, kind, chunk, microbatch)
        if microbatch == 1 and model.is_first(chunk):
            for parameter, gradient in zip(model.parameters(), kept, strict=True):
                parameter.grad.copy_(gradient)

    patch.setattr(ScheduleRun, "backward", forgetful)


def norm_doubled(patch, model):
    clip_gradients = DataParallelBucket.clip_gradients
    patch.setattr(DataParallelBucket, "clip_gradients", lambda buckets, norm: 2 * clip_gradients(buckets, norm))


RIGHT_LOSS = "- the loss is right, so forward is: look at backward, and at the sums of gradients over ranks"
FAULTS = [
    (loss_not_divided, (1, 4, 1), {}, [RIGHT_LOSS, "- all gradients are 4.00× too large: the number of micro-batches"]),
]


@pytest.mark.parametrize("fault, layout, keys, expected", FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_fault_is_found_and_named(pool, small, fault, layout, keys, expected):
    exit_code, printed = run(pool, small, *layout, fault=fault, **keys)
    *_, findings = printed.partition(" verdict\n")
    assert [line for line in findings.splitlines() if line[0] == "-"] == expected
    assert printed.endswith("\nWRONG\n") and exit_code == 1
