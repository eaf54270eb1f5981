"""Pre-trains a Llama with pipeline × tensor × data parallelism.

    torchrun --nproc_per_node 4 train.py --config configs/tiny_pp2_tp2.json
    torchrun --nproc_per_node 8 train.py --config configs/llama_1b_pp4_tp2.json training.steps=100

The whole run from top to bottom: configuration, processes, data, model, parallelism applied to it, optimizer, loop.
"""

import argparse
import json
import math
import os
import resource
import sys
import time

import torch
import torch.distributed as dist

import process_group_manager as pgm
from config import check_world_size, load_config, stop
from data import MicroBatchDataLoader, check_vocabulary, prepare_tokens
from data_parallel import DataParallelBucket
from model import build_on_meta, materialize, named_parameters
from pipeline_parallel import PipelineParallel, train_step_pipeline
from tensor_parallel import apply_tensor_parallel

# Dense bfloat16 peak of a GPU in FLOP/s, by a part of its name; the makers' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a JSON file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="any key, e.g. training.steps=20")
    return parser.parse_args(arguments)


def set_up(config):
    """Everything that can find the configuration wrong. Returns (device, data loader); the process groups exist then."""
    distributed, training = config.distributed, config.training
    check_world_size(config, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
    device = pgm.choose_device(distributed.device)
    tokens = prepare_tokens(config.dataset)
    check_vocabulary(tokens, config.model.vocab_size)
    rank = int(os.environ.get("RANK", 0))
    data_loader = MicroBatchDataLoader(
        tokens,
        seq_length=training.seq_length,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        dp_rank=rank // (distributed.tp_size * distributed.pp_size),
        dp_size=distributed.dp_size,
        seed=training.seed,
        shuffle=config.dataset.shuffle,
        device=device,
    )
    pgm.join_processes(device, distributed.timeout_seconds)
    pgm.setup_process_group_manager(distributed.tp_size, distributed.pp_size, distributed.dp_size, device)
    say_start(config, device, tokens)
    return device, data_loader


def build_model(config, device):
    """This rank's stages on `device`, with initial weights that are the same in every layout."""
    distributed = config.distributed
    model = build_on_meta(config.model, getattr(torch, config.model.dtype))
    model = apply_tensor_parallel(model)
    model = PipelineParallel(model, distributed.pp_engine, pp_layers=distributed.pp_layers)
    return materialize(model, config.model, config.training.seed, device)


def count_parameters(model):
    """The whole model's parameters, counted from what the ranks hold: shards add up, replicas and copies count once."""
    manager = pgm.process_group_manager
    mine = sum(
        parameter.numel()
        for parameter in model.parameters()
        if (hasattr(parameter, "shard") or manager.tp_rank == 0) and not getattr(parameter, "is_copy", False)
    )
    count = torch.tensor(mine if manager.dp_rank == 0 else 0, device=next(model.parameters()).device)
    dist.all_reduce(count)
    return count.item()


def flops_per_token(model_config, num_parameters, seq_length):
    """Forward and backward: 6 per weight in a matrix product and 12 · layers · n · d · s for attention (PaLM, appendix B)."""
    lookups = 0 if model_config.tie_word_embeddings else model_config.vocab_size * model_config.hidden_size
    attention = model_config.num_hidden_layers * model_config.num_attention_heads * model_config.head_dim * seq_length
    return 6 * (num_parameters - lookups) + 12 * attention


def learning_rate(step, training):
    """Of step `step` (0-based): linear warm-up, then half a cosine down to `min_learning_rate` at `steps`."""
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return training.min_learning_rate + cosine * (training.learning_rate - training.min_learning_rate)


def say(text):
    """Prints once, not once per rank."""
    if pgm.process_group_manager.global_rank == 0:
        print(text, flush=True)


def say_start(config, device, tokens):
    distributed, training = config.distributed, config.training
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say(f"grid: {pgm.process_group_manager}, on {name} with {dist.get_backend()}, {config.model.dtype}")
    if device.type == "cpu" and distributed.device == "auto":
        say("no GPU found: training on the CPU with gloo")
    say(f"data: {tokens}")
    say(
        f"global batch = {training.micro_batch_size} × {training.gradient_accumulation_steps} × {distributed.dp_size} = "
        f"{config.global_batch_size} sequences = {config.tokens_per_step:,} tokens"
    )


def say_model(model, num_parameters):
    say(f"model: {num_parameters:,} parameters")
    for stage, layers in enumerate(model.layers):
        parts = ["embedding"] if stage == 0 else []
        parts += [f"layers {layers[0]}-{layers[-1]}"] if layers else []
        parts += ["final norm, head"] if stage == model.num_stages - 1 else []
        say(f"  stage {stage} on pp rank {model.rank_of_stage[stage]}: {', '.join(parts)}")


def peak_memory(device):
    """GiB, the largest of all ranks: allocated by torch on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.tensor(float(peak), device=device, dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item() / 2**30


class Log:
    """One line a step on the screen, one object a step in `metrics_file` and wandb; from rank 0 alone."""

    def __init__(self, config, device, flops):
        self.config, self.device, self.flops = config, device, flops
        self.is_writer = pgm.process_group_manager.global_rank == 0
        settings = config.logging
        self.file = open(settings.metrics_file, "a") if settings.metrics_file and self.is_writer else None
        self.wandb = None
        if settings.use_wandb and self.is_writer:
            import wandb

            self.wandb = wandb
            wandb.init(project=settings.project_name, name=settings.run_name, config=config.model_dump())

    def step(self, metrics):
        """metrics: the JSON object of one step, as issued to `metrics_file`."""
        is_shown = metrics["step"] % self.config.logging.log_frequency == 0 or metrics["step"] == 1
        memory = peak_memory(self.device) if is_shown else None
        if self.file:
            self.file.write(json.dumps(metrics) + "\n")
            self.file.flush()
        if self.wandb:
            self.wandb.log(metrics, step=metrics["step"])
        if is_shown:
            say(self._line(memory=memory, **metrics))

    def _line(self, memory, step, loss, grad_norm, learning_rate, tokens, tokens_per_second, **_):
        ranks = pgm.process_group_manager.world_size
        line = (
            f"step {step:5d} | loss {loss:7.4f} | grad norm {grad_norm:8.4f} | lr {learning_rate:.2e} | "
            f"{tokens_per_second:9,.0f} tokens/s ({tokens_per_second / ranks:,.0f} a rank) | {tokens:,} tokens | "
            f"{memory:.2f} GiB"
        )
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
            line += f" | MFU {self.flops * tokens_per_second / ranks / peak:.1%}" if peak else ""
        return line

    def close(self):
        if self.file:
            self.file.close()
        if self.wandb:
            self.wandb.finish()


def train(config, device, data_loader):
    training, dtype = config.training, getattr(torch, config.model.dtype)
    model = build_model(config, device)
    num_parameters = count_parameters(model)
    say_model(model, num_parameters)
    data_parallel = DataParallelBucket(model)
    optimizer = data_parallel.optimizer(
        weight_decay=training.weight_decay,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
    )
    tensor_shapes = (training.micro_batch_size, training.seq_length, config.model.hidden_size)
    num_steps = training.steps
    if training.max_tokens is not None:
        num_steps = min(num_steps, training.max_tokens // config.tokens_per_step)
    log = Log(config, device, flops_per_token(config.model, num_parameters, training.seq_length))

    for step in range(num_steps):
        started = time.perf_counter()
        # ------------------------------------------------------------------------------------------------------------
        data_loader.step = step
        data_parallel.zero_grad()
        loss = train_step_pipeline(model, data_loader, tensor_shapes, device, dtype)
        data_parallel.finish_grad_sync()
        grad_norm = data_parallel.clip_gradients(training.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        data_parallel.publish()
        # ------------------------------------------------------------------------------------------------------------
        loss, grad_norm = torch.stack((loss.double(), grad_norm)).tolist()  # the step's only wait for the device
        seconds = time.perf_counter() - started
        log.step(
            {
                "step": step + 1,
                "loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": learning_rate(step, training),
                "tokens": (step + 1) * config.tokens_per_step,
                "tokens_per_second": config.tokens_per_step / seconds,
                "step_seconds": seconds,
            }
        )
    log.close()


def main(arguments=None):
    arguments = parse_arguments(arguments)
    try:
        config = load_config(arguments.config, arguments.overrides)
        device, data_loader = set_up(config)
    except (ValueError, OSError) as problem:
        stop(problem)
    try:
        train(config, device, data_loader)
    except Exception as error:
        pgm.report_failure(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # Ctrl-C reaches every rank: no stack trace from any of them
        os._exit(130)
