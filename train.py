"""Pre-trains a Llama with pipeline × tensor × data parallelism.

    torchrun --nproc_per_node 4 train.py --config configs/tiny_pp2_tp2.json
    torchrun --nproc_per_node 8 train.py --config configs/llama_1b_pp4_tp2.json training.steps=100

The whole run from top to bottom: configuration, processes, data, model, parallelism applied to it, optimizer, loop.
"""

import argparse
import math
import os
import sys
import time

import torch
import torch.distributed as dist

import process_group_manager as pgm
from config import check_world_size, load_config, stop
from data import MicroBatchDataLoader, check_vocabulary, prepare_tokens
from data_parallel import DataParallelBucket
from log import Log, check_outputs, count_parameters, flops_per_token, say, say_model, say_start
from model import build_on_meta, materialize
from pipeline_parallel import PipelineParallel, evaluate, train_step_pipeline
from plan import dry_run, explain_stages, settle_stages
from tensor_parallel import apply_tensor_parallel
from timeline import make_clock, write_trace
from verify import verify


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a JSON file, see configs/")
    parser.add_argument("--verify", action="store_true", help="no training: check one step against one process")
    parser.add_argument("--dry-run", action="store_true", help="no training: print what a step takes")
    parser.add_argument("--memory", metavar="80GB", help="with --dry-run: of each rank; name layouts that fit")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print it as JSON")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="any key, e.g. training.steps=20")
    arguments = parser.parse_args(arguments)
    if (arguments.memory or arguments.json) and not arguments.dry_run:
        parser.error("--memory and --json need --dry-run")
    return arguments


def set_up(config):
    """Everything that can find the configuration wrong. Returns (device, training data, validation data or None)."""
    distributed, data = config.distributed, config.dataset
    settle_layout(config, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    check_outputs(config.logging)
    device = pgm.choose_device(distributed.device)
    tokens = prepare_tokens(data)
    validation_tokens = None
    if data.validation_files:
        validation_tokens = prepare_tokens(data.model_copy(update={"files": data.validation_files, "name": None}))
    elif data.validation_fraction:
        tokens, validation_tokens = tokens.split(data.validation_fraction)
    train_data = make_loader(config, tokens, device, data.shuffle)
    validation_data = make_loader(config, validation_tokens, device, False) if validation_tokens else None
    pgm.join_processes(device, distributed.timeout_seconds)
    pgm.setup_process_group_manager(distributed.tp_size, distributed.pp_size, distributed.dp_size, device)
    say_start(config, device, tokens)
    return device, train_data, validation_data


def settle_layout(config, world_size):
    """Fills in what the layout leaves open. Raises ValueError for a grid, a schedule or stages that cannot be."""
    check_world_size(config, world_size)
    settle_stages(config)


def make_loader(config, tokens, device, shuffle):
    check_vocabulary(tokens, config.model.vocab_size)
    training, distributed = config.training, config.distributed
    return MicroBatchDataLoader(
        tokens,
        seq_length=training.seq_length,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        dp_rank=int(os.environ.get("RANK", 0)) // (distributed.tp_size * distributed.pp_size),
        dp_size=distributed.dp_size,
        seed=training.seed,
        shuffle=shuffle,
        device=device,
    )


def build_model(config, device):
    """This rank's stages on `device`, with initial weights that are the same in every layout."""
    distributed = config.distributed
    model = build_on_meta(config.model, getattr(torch, config.model.dtype))
    model = apply_tensor_parallel(model, distributed.sequence_parallel)
    recompute_every = {"none": 0, "layer": 1}.get(config.model.recompute, config.model.recompute)
    model = PipelineParallel(
        model, distributed.pp_engine, distributed.pp_chunks, distributed.pp_layers, recompute_every
    )
    model.show_transfers, model.clock = config.logging.show_transfers, make_clock(device)
    return materialize(model, config.model, config.training.seed, device)


def learning_rate(step, training):
    """Of step `step` (0-based): linear warm-up, then half a cosine down to `min_learning_rate` at `steps`."""
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return training.min_learning_rate + cosine * (training.learning_rate - training.min_learning_rate)


def train(config, device, train_data, validation_data):
    training, distributed, dtype = config.training, config.distributed, getattr(torch, config.model.dtype)
    model = build_model(config, device)
    num_parameters = count_parameters(model)
    say_model(model, num_parameters)
    if distributed.pp_size > 1:
        say(explain_stages(config))
    data_parallel = DataParallelBucket(model, distributed.zero1)
    optimizer = data_parallel.optimizer(
        weight_decay=training.weight_decay,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
    )
    local_seq_length = training.seq_length // (distributed.tp_size if distributed.sequence_parallel else 1)
    boundary = ((training.micro_batch_size, local_seq_length, config.model.hidden_size), device, dtype)
    num_steps = training.steps
    if training.max_tokens is not None:
        num_steps = min(num_steps, training.max_tokens // config.tokens_per_step)
    log = Log(config, device, flops_per_token(config.model, num_parameters, training.seq_length))

    for step in range(num_steps):
        is_traced = config.logging.trace_file is not None and step + 1 == config.logging.trace_step
        if is_traced:
            dist.barrier()
        started, zero = time.perf_counter(), model.clock()
        # -------------------------------------------------------------------------------------------------------------
        train_data.step = step
        data_parallel.zero_grad()
        loss = train_step_pipeline(model, train_data, *boundary)
        data_parallel.finish_grad_sync()
        grad_norm = data_parallel.clip_gradients(training.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        data_parallel.publish()
        # -------------------------------------------------------------------------------------------------------------
        loss, grad_norm = torch.stack((loss.double(), grad_norm)).tolist()  # the step's only wait for the device
        seconds = time.perf_counter() - started
        metrics = {
            "step": step + 1,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate(step, training),
            "tokens": (step + 1) * config.tokens_per_step,
            "tokens_per_second": config.tokens_per_step / seconds,
            "step_seconds": seconds,
        }
        if is_traced:
            write_trace(config.logging.trace_file, model, training.gradient_accumulation_steps, zero)
        if training.eval_frequency and (step + 1) % training.eval_frequency == 0:
            eval_steps = min(training.eval_steps, validation_data.steps_per_epoch)
            metrics["validation_loss"] = evaluate(model, validation_data, *boundary, eval_steps).item()
        log.step(model, metrics)
    log.close()
    return 0


def main(arguments=None):
    arguments = parse_arguments(arguments)
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            grid = config.distributed
            settle_layout(config, grid.tp_size * grid.pp_size * (grid.dp_size or 1))
            print(dry_run(config, arguments.memory, arguments.json))
            return 0
        set_up_run = set_up(config)
    except (ValueError, OSError) as problem:
        stop(problem)
    try:
        if arguments.verify:
            device, train_data, *_ = set_up_run
            exit_code = verify(config, build_model(config, device), train_data, device)
        else:
            exit_code = train(config, *set_up_run)
    except Exception as error:
        pgm.report_failure(error)
    dist.barrier()  # nobody leaves while others still read from it
    return exit_code


if __name__ == "__main__":
    try:
        exit_code = main()
    except KeyboardInterrupt:  # Ctrl-C reaches every rank: no stack trace from any of them
        exit_code = 130
    sys.stdout.flush()
    os._exit(exit_code or 0)  # the interpreter's tidy ending can abort over gloo's threads
