"""
    loader = MicroBatchDataLoader(prepare_tokens(config.dataset), seq_length=256, ...)
    loader.step = 7
    loader[0]["input_ids"], loader[0]["target_ids"]                    # micro-batch 0 of step 7, for this dp rank

A batch is a pure function of (step, micro-batch, dp rank) that reads a few windows of the token file. So every pipeline
stage works out the same tokens without being sent them, resuming needs only the step number, and no rank can run out
of data alone.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from token_file import TokenFile


@functools.lru_cache(maxsize=1)
def permutation(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_sequences)


@dataclass
class MicroBatchDataLoader:
    """`loader[i]` is micro-batch i of step `loader.step` (from 0): a function of (step, i, dp_rank) and nothing else.

    Sequence i of the data is tokens [i*S, i*S + S], S + 1 of them, as targets are inputs shifted by one. One step takes
    the next G = micro_batch_size * gradient_accumulation_steps * dp_size sequences of its epoch, however G factors.
    """

    tokens: TokenFile
    seq_length: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int
    seed: int
    shuffle: bool
    device: torch.device | str
    step: int = 0

    def __post_init__(self):
        num_tokens, window = self.tokens.num_tokens, self.seq_length + 1
        if num_tokens < window:
            raise ValueError(f"the data set has {num_tokens} tokens; one sequence needs {window}")
        self.num_sequences = (num_tokens - 1) // self.seq_length
        self.global_batch_size = self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size
        self.steps_per_epoch = self.num_sequences // self.global_batch_size  # what does not fill a batch is dropped
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"the data set has {self.num_sequences} sequences of {self.seq_length} tokens; one global batch needs "
                f"{self.global_batch_size} = micro_batch_size {self.micro_batch_size} x gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} x dp_size {self.dp_size}: lower one of these, or seq_length"
            )
        self.ids = self.tokens.open()

    def __getitem__(self, micro_batch: int) -> dict[str, torch.Tensor]:
        assert 0 <= micro_batch < self.gradient_accumulation_steps, f"{micro_batch=}"
        epoch, step = divmod(self.step, self.steps_per_epoch)
        # dp ranks take turns: micro-batch i of rank d of 2 is micro-batch 2i + d of a single rank.
        start = step * self.global_batch_size + (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        sequences = np.arange(start, start + self.micro_batch_size)
        if self.shuffle:
            sequences = permutation(self.num_sequences, self.seed, epoch)[sequences]
        positions = sequences[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        batch = torch.from_numpy(self.ids[positions].astype(np.int64))  # (micro_batch_size, seq_length + 1)
        if batch.max() > self.tokens.max_token_id:  # an embedding or a loss split over ranks would not notice
            raise ValueError(f"{self.tokens.path} has changed since it was written; delete it to tokenise again")
        if torch.device(self.device).type == "cuda":
            batch = batch.pin_memory()  # only a copy from pinned memory does not wait for the GPU
        batch = batch.to(self.device, non_blocking=True)
        return {"input_ids": batch[:, :-1].contiguous(), "target_ids": batch[:, 1:].contiguous()}
