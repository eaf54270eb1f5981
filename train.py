"""Pre-trains a Llama with pipeline × tensor × data parallelism.

    torchrun --nproc_per_node 4 train.py --config configs/tiny_pp2_tp2.json
    torchrun --nproc_per_node 8 train.py --config configs/llama_1b_pp4_tp2.json training.steps=100

The whole run from top to bottom: configuration, processes, data, model, parallelism applied to it, optimizer, loop.
"""

import argparse
import math
import os
import signal
import sys
import time
import zlib

import torch
import torch.distributed as dist

import failure
import process_group_manager as pgm
import rendezvous
from checkpoint_folder import find_weights
from data import MicroBatchDataLoader
from failure import stop
from log import Log, check_outputs, count_parameters, flops_per_token, say, say_model, say_start
from pipeline_parallel import evaluate, train_step_pipeline
from plan import dry_run
from read_config import load_config
from run import Run, boundary_of, build_model
from stages import explain_stages, settle_stages, timetable_of
from timeline import write_trace
from token_file import check_vocabulary, prepare_tokens
from verify import verify


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a JSON file, see configs/")
    parser.add_argument("--verify", action="store_true", help="no training: check one step against one process")
    parser.add_argument("--dry-run", action="store_true", help="no training: print what a step takes")
    parser.add_argument("--memory", metavar="80GB", help="with --dry-run: of each rank; name layouts that fit")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print it as JSON")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="any key, e.g. training.steps=20")
    parser.error = stop
    arguments = parser.parse_intermixed_args(arguments)
    if (arguments.memory or arguments.json) and not arguments.dry_run:
        parser.error("--memory and --json need --dry-run")
    return arguments


def set_up(config, is_verify=False):
    """Everything that can find the configuration wrong. Returns (device, training data, validation data or None)."""
    distributed, data = config.distributed, config.dataset
    settle_layout(config, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    check_outputs(config.logging)
    device = pgm.choose_device(distributed.device)
    if config.checkpoint.init_from:
        config.checkpoint.init_from = find_weights(config.checkpoint.init_from)
    tokens = prepare_tokens(data)
    validation_tokens = None
    if data.validation_files:
        validation_tokens = prepare_tokens(data.model_copy(update={"files": data.validation_files, "name": None}))
    elif data.validation_fraction:
        tokens, validation_tokens = tokens.split(data.validation_fraction)
    train_data = make_loader(config, tokens, device, data.shuffle)
    validation_data = None
    if validation_tokens:
        try:
            validation_data = make_loader(config, validation_tokens, device, False)
        except ValueError as problem:
            raise ValueError(f"for validation: {problem}") from None
    settings = {"--verify": is_verify, **shared_settings(config, tokens, validation_tokens)}
    rendezvous.join_processes(device, distributed.timeout_seconds, settings)
    failure.watch()
    pgm.setup_process_group_manager(distributed.tp_size, distributed.pp_size, distributed.dp_size, device)
    say_start(config, device, tokens)
    return device, train_data, validation_data


def settle_layout(config, world_size):
    """Fills in what the layout leaves open. Raises ValueError for a grid, a schedule or stages that cannot be."""
    pgm.check_world_size(config, world_size)
    most, needed = config.training.max_tokens, config.tokens_per_step
    if most is not None and most < needed:
        raise ValueError(f"training.max_tokens: {most} is less than one step has: must be at least {needed}")
    settle_stages(config)


def shared_settings(config, tokens, validation_tokens):
    """What has to be the same on all ranks, or they would train something else than anybody meant."""
    sections = dict.fromkeys(("distributed", "model", "training", "checkpoint"), True)
    settings = config.model_dump(
        include=sections | {"logging": {"log_frequency", "trace_step"}},
        exclude={"model": {"name"}, "checkpoint": {"init_from"}},  # which may be folders of this machine
    )
    named = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
    engine = config.distributed.pp_engine
    if ":" in engine:  # a schedule of the user's own might depend on the process that makes it
        timetable = timetable_of(config)
        named[f"the schedule {engine}"] = zlib.crc32(repr((timetable.lists, timetable.stages)).encode())
    return named | {
        "whether there is a checkpoint.init_from": config.checkpoint.init_from is not None,
        "whether there is a logging.trace_file": config.logging.trace_file is not None,
        "dataset.shuffle": config.dataset.shuffle,
        "the data's SHA-256": tokens.sha256,
        "the validation data's": validation_tokens and [validation_tokens.sha256, validation_tokens.num_tokens],
    }


def make_loader(config, tokens, device, shuffle):
    check_vocabulary(tokens, config.model.vocab_size)
    training, d = config.training, config.distributed
    return MicroBatchDataLoader(
        tokens,
        seq_length=training.seq_length,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        dp_rank=pgm.coordinates(int(os.environ.get("RANK", 0)), d.tp_size, d.pp_size, d.dp_size)[0],
        dp_size=d.dp_size,
        seed=training.seed,
        shuffle=shuffle,
        device=device,
    )


def learning_rate(step, training):
    """Of step `step` (0-based): linear warm-up, then half a cosine down to `min_learning_rate` at `steps`."""
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return training.min_learning_rate + cosine * (training.learning_rate - training.min_learning_rate)


def train_step(run, tensor_shapes, device, dtype):
    """One optimizer step. Returns the loss and gradient norm of the global batch; when one is not finite, the weights
    stay as they are.
    """
    run.train_data.step = run.sequences // run.config.global_batch_size
    run.data_parallel.zero_grad()
    loss = train_step_pipeline(run.model, run.train_data, tensor_shapes, device, dtype)
    run.data_parallel.finish_grad_sync()
    grad_norm = run.data_parallel.clip_gradients(run.config.training.grad_clip)
    loss, grad_norm = torch.stack((loss.double(), grad_norm)).tolist()  # the step's only wait for the device
    if math.isfinite(loss) and math.isfinite(grad_norm):
        run.optimizer.lr = learning_rate(run.step, run.config.training)
        run.optimizer.step()
        run.data_parallel.publish()
    return loss, grad_norm


def train(run, validation_data, device):
    config, training, model = run.config, run.config.training, run.model
    num_parameters = count_parameters(model)
    say_model(model, num_parameters)
    if config.distributed.pp_size > 1:
        say(explain_stages(config))
    boundary = boundary_of(config, device)
    log = Log(config, device, flops_per_token(config.model, num_parameters, training.seq_length))
    signals, bad_steps = Signals(), 0
    traced_step = run.step + config.logging.trace_step if config.logging.trace_file else None
    if is_finished(run):
        limits = f"training.steps {training.steps}, max_tokens {training.max_tokens}"
        say(f"nothing to do: at step {run.step} with {run.tokens:,} tokens ({limits})")

    while not is_finished(run) and not signals.received(device):
        is_traced = run.step + 1 == traced_step
        if is_traced:
            dist.barrier(group=pgm.process_group_manager.patient_group)
        started, zero = time.perf_counter(), model.clock()
        loss, grad_norm = train_step(run, *boundary)
        seconds = time.perf_counter() - started
        metrics = {
            "step": run.step + 1,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate(run.step, training),
            "tokens": run.tokens + config.tokens_per_step,
            "tokens_per_second": config.tokens_per_step / seconds,
            "step_seconds": seconds,
        }
        run.step, run.tokens = metrics["step"], metrics["tokens"]
        run.sequences += config.global_batch_size
        if is_traced:
            try:
                write_trace(config.logging.trace_file, model, training.gradient_accumulation_steps, zero)
            except OSError as problem:  # on rank 0
                say(f"warning: logging.trace_file: {problem}: no trace")
        if training.eval_frequency and run.step % training.eval_frequency == 0:
            eval_steps = min(training.eval_steps, validation_data.steps_per_epoch)
            metrics["validation_loss"] = evaluate(model, validation_data, *boundary, eval_steps).item()
        log.step(model, metrics)
        if math.isfinite(loss) and math.isfinite(grad_norm):
            bad_steps = 0
            if config.checkpoint.save_frequency and run.step % config.checkpoint.save_frequency == 0:
                run.save()
        else:
            bad_steps += 1
            where = run.data_parallel.where_not_finite()
            say(f"step {run.step} is not applied: loss {loss:.4g}, gradient norm {grad_norm:.4g}; {where}")
            if bad_steps == training.max_bad_steps:
                failure.stop_all(f"{bad_steps} steps in a row were not finite (training.max_bad_steps)")
    if traced_step and run.step < traced_step:
        say("warning: the run ended before logging.trace_step: no trace")
    if bad_steps and not run.data_parallel.weights_are_finite():
        failure.stop_all("not saved: the weights are not finite")
    run.save()
    if signals.on_any_rank:
        say(f"ended by a signal after step {run.step}")
    log.close()


def is_finished(run):
    training = run.config.training
    out_of_tokens = training.max_tokens is not None and run.tokens + run.config.tokens_per_step > training.max_tokens
    return run.step >= training.steps or out_of_tokens


class Signals:
    """SIGTERM and SIGUSR1 (Slurm's warnings) end the run after the step at hand, on all ranks after the same one."""

    def __init__(self):
        self.flag, self.on_any_rank = 0, False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._set)

    def _set(self, number, frame):
        self.flag = 1

    def received(self, device):
        flag = torch.tensor(self.flag, device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        self.on_any_rank = bool(flag)
        return self.on_any_rank


def main(arguments=None):
    arguments = parse_arguments(arguments)
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            grid = config.distributed
            settle_layout(config, grid.tp_size * grid.pp_size * (grid.dp_size or 1))
            plan = dry_run(config, arguments.memory, arguments.json)
            if os.environ.get("RANK", "0") == "0":
                print(plan)
            return 0
        device, train_data, validation_data = set_up(config, arguments.verify)
        if not arguments.verify:
            run = Run(config, device, train_data)
            run.restore()
    except (ValueError, OSError) as problem:
        failure.stop_all(problem) if dist.is_initialized() else stop(problem)
    except Exception as error:
        failure.report_failure(error)
    try:
        if arguments.verify:
            exit_code = verify(config, build_model(config, device), train_data, device)
        else:
            train(run, validation_data, device)
            exit_code = 0
        failure.ending = True
        dist.barrier(group=pgm.process_group_manager.patient_group)  # nobody leaves while others still read from it
    except Exception as error:
        failure.report_failure(error)
    return exit_code


def main_and_exit(arguments=None):
    try:
        exit_code = main(arguments)
    except SystemExit as stopped:  # `stop`
        exit_code = stopped.code
    except KeyboardInterrupt:  # Ctrl-C reaches every rank: no stack trace from any of them
        exit_code = 130
        if os.environ.get("RANK", "0") == "0":
            print("\nended by Ctrl-C without saving; SIGTERM ends a run after the step at hand, saved", flush=True)
    sys.stdout.flush()
    os._exit(exit_code)  # the interpreter's tidy ending can abort over gloo's threads


if __name__ == "__main__":
    main_and_exit()
