"""What a run tells: the lines on the screen, the metrics file and wandb. Printed once, not once per rank."""

import json
import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import process_group_manager as pgm
from data_parallel import counts_here
from timeline import bubbles

# Dense bfloat16 peak of a GPU in FLOP/s, by a part of its name, the first that fits; the makers' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def check_outputs(settings):
    """Before training: can what `logging` asks for be written? Raises ValueError or OSError."""
    for key, begins in (("metrics_file", b'{"step"'), ("trace_file", b'{"traceEvents"')):
        if path := getattr(settings, key):
            folder = os.path.dirname(path) or "."
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as problem:
                raise ValueError(f"logging.{key}: {path}: {problem}") from None
            if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
                raise ValueError(f"logging.{key}: {path} cannot be written")
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    if not begins.startswith(file.read(len(begins))):
                        raise ValueError(f"logging.{key}: {path} is there, and no run has written it; name another")
            elif Path(path).is_fifo():
                raise ValueError(f"logging.{key}: {path} is a pipe; it must be a file")
    trace = settings.trace_file
    if trace and trace == settings.metrics_file and not Path(trace).is_char_device():  # /dev/null may take both
        raise ValueError(f"logging.trace_file: {trace} is logging.metrics_file, too; name another")
    if settings.use_wandb and os.environ.get("RANK", "0") == "0":
        try:
            import wandb
        except ImportError:
            raise ValueError("logging.use_wandb: true, but the package wandb is not installed here") from None
        online = os.environ.get("WANDB_MODE", "online") == "online"
        if online and not wandb.login(prompt=False, verify=False):  # it must not ask, from one of several processes
            raise ValueError(
                "logging.use_wandb: true, but there is no wandb login; run `wandb login` or set WANDB_MODE=offline"
            )


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
        f"global batch = {training.micro_batch_size} × {training.gradient_accumulation_steps} × {distributed.dp_size}"
        f" = {config.global_batch_size} sequences = {config.tokens_per_step:,} tokens"
    )


def say_model(model, num_parameters):
    say(f"model: {num_parameters:,} parameters")
    for stage, layers in enumerate(model.layers):
        parts = ["embedding"] if stage == 0 else []
        parts += [f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"] if layers else []
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


def count_parameters(model):
    """The whole model's parameters, counted from what the ranks hold: shards add up, replicas and copies count once."""
    mine = sum(parameter.numel() for parameter in model.parameters() if counts_here(parameter))
    is_counting = pgm.process_group_manager.dp_rank == 0
    count = torch.tensor(mine if is_counting else 0, device=next(model.parameters()).device)
    dist.all_reduce(count)
    return count.item()


def flops_per_token(model_config, num_parameters, seq_length):
    """Forward and backward: 6 per weight of a product, 12 · layers · n · d · s for attention (PaLM, appendix B)."""
    lookups = 0 if model_config.tie_word_embeddings else model_config.vocab_size * model_config.hidden_size
    attention = model_config.num_hidden_layers * model_config.num_attention_heads * model_config.head_dim * seq_length
    return 6 * (num_parameters - lookups) + 12 * attention


class Log:
    """One line a step on the screen, one object a step in `metrics_file` and wandb; from rank 0 alone."""

    def __init__(self, config, device, flops):
        self.config, self.device, self.flops = config, device, flops
        self.is_writer = pgm.process_group_manager.global_rank == 0
        settings = config.logging
        self.file = None
        if settings.metrics_file and self.is_writer:
            self.file = open(settings.metrics_file, "ab", buffering=0)  # every line is written at once, or fails now
        self.wandb = None
        if settings.use_wandb and self.is_writer:
            import wandb

            self.wandb = wandb
            wandb.init(project=settings.project_name, name=settings.run_name, config=config.model_dump())

    def step(self, model, metrics):
        """metrics: the JSON object of one step, as it goes to `metrics_file`. All ranks call this."""
        if self.file:
            try:
                self.file.write((json.dumps(metrics) + "\n").encode())
            except OSError as problem:
                say(f"warning: logging.metrics_file: {problem}: nothing more is written to it")
                self.file = None
        if self.wandb:
            self.wandb.log(metrics, step=metrics["step"])
        if metrics["step"] % self.config.logging.log_frequency == 0 or metrics["step"] == 1:
            say(" | ".join(self._fields(model, **metrics)))

    def _fields(
        self, model, step, loss, grad_norm, learning_rate, tokens, tokens_per_second, validation_loss=None, **_
    ):
        ranks = pgm.process_group_manager.world_size
        yield f"step {step:5d} | loss {loss:7.4f} | grad norm {grad_norm:8.4f} | lr {learning_rate:.2e}"
        yield f"{tokens_per_second:9,.0f} tokens/s ({tokens_per_second / ranks:,.0f} a rank) | {tokens:,} tokens"
        yield f"{peak_memory(self.device):.2f} GiB"
        if pgm.process_group_manager.pp_size > 1:
            num_microbatches = self.config.training.gradient_accumulation_steps
            yield "bubble {:.0%} ({:.0%} predicted)".format(*bubbles(model, num_microbatches, self.device))
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
            if peak:
                yield f"MFU {self.flops * tokens_per_second / ranks / peak:.1%}"
        if validation_loss is not None:
            yield f"validation loss {validation_loss:.4f}"

    def close(self):
        if self.file:
            self.file.close()
        if self.wandb:
            self.wandb.finish()
