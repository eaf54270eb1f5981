"""A run: the model on this rank, its optimizer, and where training stands. Built from a config, saved and restored."""

from pathlib import Path

import torch

import process_group_manager as pgm
from checkpoint import load_checkpoint, load_weights, save_checkpoint
from checkpoint_folder import find_checkpoint, find_weights, lock_save_dir
from config import stop
from data import cache_key
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
        self.data_start = 0  # the step at which this data set began
        self.saved_step = None

    def restore(self):
        """Continues from a checkpoint, or starts from given weights. Raises the same ValueError on all ranks."""
        checkpoint, parts = self.config.checkpoint, (self.model, self.data_parallel, self.optimizer)
        if checkpoint.save_dir:
            self.lock = lock_save_dir(checkpoint.save_dir)
        path = None
        if checkpoint.save_dir or checkpoint.resume not in ("auto", "none"):
            path = find_checkpoint(checkpoint.resume, checkpoint.save_dir)
        if path:
            state = load_checkpoint(path, *parts)
            self.step, self.tokens, self.data_start = state["step"], state["tokens"], state["data_start"]
            self.saved_step = self.step if path.parent == Path(checkpoint.save_dir or "") else None
            say(f"resumed from {path} at step {self.step}")
            if state["data"] != self._data():
                say("warning: the data, its order or the global batch are not the checkpoint's: the data starts anew")
                self.data_start = self.step
        elif checkpoint.init_from:
            load_weights(find_weights(checkpoint.init_from), *parts)
            say(f"weights from {checkpoint.init_from}")

    def save(self):
        checkpoint = self.config.checkpoint
        if checkpoint.save_dir is None or self.saved_step == self.step:
            return
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "data": self._data(),
            "data_start": self.data_start,
            "config": self.config.model_dump(),
        }
        tokenizer = None
        if self.config.dataset.tokenizer != "bytes" and pgm.process_group_manager.global_rank == 0:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.config.dataset.tokenizer)
        parts = (self.model, self.data_parallel, self.optimizer)
        try:
            save_checkpoint(checkpoint.save_dir, *parts, state, tokenizer, checkpoint.keep)
        except (ValueError, OSError) as problem:
            stop(problem)
        self.saved_step = self.step
        say(f"saved step {self.step} in {checkpoint.save_dir}")

    def _data(self):
        """What decides which tokens a step sees."""
        data, training = self.config.dataset, self.config.training
        return {
            "key": cache_key(data),
            "validation_fraction": data.validation_fraction,
            "order": [data.shuffle, training.seed],
            "batch": [self.config.global_batch_size, training.seq_length],
        }
