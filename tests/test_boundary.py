"""At a stage boundary the sender refuses what the receiver does not expect, and large messages do not block."""

import pytest
import torch

import process_group_manager as pgm
from layouts import MICRO_BATCH_SIZE, SEQ_LENGTH, RandomMicroBatches, tiny_config
from model import build_on_meta, materialize
from pipeline_parallel import PipelineParallel, train_step_pipeline
from tensor_parallel import apply_tensor_parallel
from workers import WorkerError

CPU = torch.device("cpu")


def build(config):
    pgm.setup_process_group_manager(1, 2, 1)
    model = PipelineParallel(apply_tensor_parallel(build_on_meta(config, torch.float32)))
    return materialize(model, config, seed=1, device=CPU)


def step_with_boundary(seq_length, dtype):
    config = tiny_config()
    shape = (MICRO_BATCH_SIZE, seq_length, config.hidden_size)
    train_step_pipeline(build(config), RandomMicroBatches(config.vocab_size, 2), shape, CPU, dtype)


@pytest.mark.parametrize(
    "seq_length, dtype",
    [(SEQ_LENGTH + 1, torch.float32), (SEQ_LENGTH - 1, torch.float32), (SEQ_LENGTH, torch.bfloat16)],
)
def test_the_sender_refuses_another_shape_or_dtype(pool, seq_length, dtype):
    with pytest.raises(WorkerError, match="stage 0 would send F0 as .* torch.float32; stage 1 expects"):
        pool.run(2, step_with_boundary, seq_length, dtype)


class LargeMicroBatches:
    """8 sequences of 512 tokens: with hidden size 512, messages of 8 MiB."""

    gradient_accumulation_steps = 2

    def __getitem__(self, microbatch):
        tokens = torch.randint(61, (8, 513), generator=torch.Generator().manual_seed(microbatch))
        return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}


def train_with_large_messages(num_steps):
    heads = dict(num_attention_heads=1, num_key_value_heads=1)  # little arithmetic beside the large messages
    config = tiny_config(hidden_size=512, num_hidden_layers=2, max_position_embeddings=512, **heads)
    model = build(config)
    return [
        train_step_pipeline(model, LargeMicroBatches(), (8, 512, 512), CPU, torch.float32) for _ in range(num_steps)
    ]


def test_messages_of_several_megabytes_do_not_hang(pool):
    first, second = pool.run(2, train_with_large_messages, 20)
    assert len(first) == 20 and torch.stack(first).isfinite().all()
    assert torch.equal(torch.stack(first), torch.stack(second))  # every rank knows the loss
