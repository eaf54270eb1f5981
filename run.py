"""A run: the model on this rank, its optimizer, and where training stands. Built from a config, saved and restored."""

import os
from pathlib import Path

import torch

import failure
from architecture import show
from checkpoint import load_checkpoint, load_weights, save_checkpoint
from checkpoint_folder import checkpoints_in, find_checkpoint, lock_save_dir, on_all_ranks, step_of
from data_parallel import DataParallelBucket
from log import say
from model import build_on_meta, materialize
from pipeline_parallel import PipelineParallel
from tensor_parallel import apply_tensor_parallel
from timeline import make_clock


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


def boundary_of(config, device):
    """(shape, device, dtype) of the one tensor that crosses a stage boundary, either way."""
    training, distributed = config.training, config.distributed
    local_seq_length = training.seq_length // (distributed.tp_size if distributed.sequence_parallel else 1)
    shape = (training.micro_batch_size, local_seq_length, config.model.hidden_size)
    return shape, device, getattr(torch, config.model.dtype)


class Run:
    """Model, optimizer and where training stands: what a checkpoint holds."""

    def __init__(self, config, device, train_data):
        training = config.training
        self.config, self.train_data = config, train_data
        self.model = build_model(config, device)
        self.data_parallel = DataParallelBucket(self.model, config.distributed.zero1)
        self.optimizer = self.data_parallel.optimizer(
            weight_decay=training.weight_decay,
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
        )
        self.step, self.tokens = 0, 0  # so far
        self.sequences = 0  # read so far of this data set, in its order
        self.saved_step, self.tokenizer = None, None
        data = config.dataset
        self.data = {  # what decides which tokens the n-th sequence has
            "sha256": train_data.tokens.sha256,
            "validation_fraction": data.validation_fraction,
            "order": [data.shuffle, training.seed, training.seq_length],
        }
        layout = {"micro_batch_size", "gradient_accumulation_steps"}
        self.course = training.model_dump(exclude=layout) | {"global_batch_size": config.global_batch_size}

    def restore(self):
        """Continues from a checkpoint, or starts from given weights. Raises the same ValueError on all ranks."""
        checkpoint, parts = self.config.checkpoint, (self.model, self.data_parallel, self.optimizer)
        if checkpoint.save_dir:
            self.lock = lock_save_dir(checkpoint.save_dir)
            on_all_ranks(self._load_tokenizer, only=0)
            self._keep_apart(checkpoint)
        path = None
        if checkpoint.save_dir or checkpoint.resume not in ("auto", "none"):
            path = find_checkpoint(checkpoint.resume, checkpoint.save_dir)
        if path:
            state = load_checkpoint(path, *parts)
            self.step, self.tokens, self.sequences = state["step"], state["tokens"], state["sequences"]
            self.saved_step = self.step if path.parent == Path(checkpoint.save_dir or "") else None
            say(f"resumed from {path} at step {self.step}")
            self._compare(state)
            if checkpoint.init_from:
                say(f"checkpoint.init_from = {checkpoint.init_from}: not used, the weights are the checkpoint's")
        elif checkpoint.init_from:
            load_weights(checkpoint.init_from, *parts)
            say(f"weights from {checkpoint.init_from}")

    def _keep_apart(self, checkpoint):
        """A run that does not begin with what `save_dir` has must not write among it."""
        save_dir, resume = Path(checkpoint.save_dir), checkpoint.resume
        begins_there = resume == "auto" or (resume != "none" and Path(resume).resolve().parent == save_dir.resolve())
        if begins_there or not any(save_dir.glob("step_*")):
            return
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            raise ValueError(
                f"checkpoint.resume: {resume!r}, but {save_dir} has checkpoints, which checkpoint.resume=auto would "
                "continue; empty it first, or take another checkpoint.save_dir"
            )
        checkpoint.resume = "auto"  # torchrun has started the ranks again, and they are this run's own

    def _compare(self, state):
        """Says where this run is not the one that saved `state`, which has just been loaded."""
        if state["data"] != self.data:
            say("warning: the data set, its tokenizer or its order is not the checkpoint's: it starts anew")
            self.sequences = 0
        then = state.get("course", self.course)
        changes = [
            f"{key} {show(then.get(key))} -> {show(now)}" for key, now in self.course.items() if then.get(key) != now
        ]
        if changes:
            say(f"note: since that checkpoint: {', '.join(changes)}")
        checkpoint = self.config.checkpoint
        if checkpoint.resume != "auto" and self.saved_step is not None:
            newest = next(iter(checkpoints_in(checkpoint.save_dir)), None)  # none, if it was a copy with another name
            if newest and step_of(newest) > self.step:
                say(f"warning: {newest} is later: checkpoint.resume=auto would take it, and checkpoint.keep counts it")

    def _load_tokenizer(self):
        """For its files in the checkpoint: at the start, since that it cannot be had should not come up hours later."""
        if self.config.dataset.tokenizer != "bytes":
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.config.dataset.tokenizer)

    def save(self):
        checkpoint = self.config.checkpoint
        if checkpoint.save_dir is None or self.saved_step == self.step:
            return
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "data": self.data,
            "course": self.course,
            "config": self.config.model_dump(exclude={"distributed"}),  # no layout in any file
        }
        parts = (self.model, self.data_parallel, self.optimizer)
        try:
            save_checkpoint(checkpoint.save_dir, *parts, state, self.tokenizer, checkpoint.keep)
        except (ValueError, OSError) as problem:
            failure.stop_all(problem)
        self.saved_step = self.step
        say(f"saved step {self.step} in {checkpoint.save_dir}")
