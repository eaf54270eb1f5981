"""Buckets: what is reduced, how often and when; wrapped modules that are not ours; the gradient norm; ZeRO-1."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import data_parallel
import process_group_manager as pgm
from data_parallel import DataParallelBucket
from layouts import MICRO_BATCH_SIZE, SEQ_LENGTH, RandomMicroBatches, tiny_config
from model import build_on_meta, materialize
from pipeline_parallel import PipelineParallel, train_step_pipeline
from tensor_parallel import apply_tensor_parallel


def build(tp=1, pp=1, dp=1, engine="1f1b", chunks=1, bucket_elements=1000, **changes):
    manager = pgm.process_group_manager or pgm.setup_process_group_manager(tp, pp, dp)
    config = tiny_config(**changes)
    model = PipelineParallel(apply_tensor_parallel(build_on_meta(config, torch.float64)), engine, chunks)
    materialize(model, config, seed=1, device=torch.device("cpu"))
    return manager, config, model, DataParallelBucket(model, bucket_elements=bucket_elements)


def train_step(config, model, microbatches, manager):
    data_loader = RandomMicroBatches(config.vocab_size, microbatches, manager.dp_rank, manager.dp_size)
    shapes = (MICRO_BATCH_SIZE, SEQ_LENGTH, config.hidden_size)
    return train_step_pipeline(model, data_loader, shapes, torch.device("cpu"), torch.float64)


# --- how often and when ---


def count_reductions(engine, chunks, microbatches):
    """Three steps; of each, how many buckets are reduced, and how many buckets had started before backward was over."""
    manager, config, model, wrapper = build(1, 2, 2, engine, chunks, tie_word_embeddings=True)
    reduced, original = [], dist.all_reduce

    def counting_all_reduce(tensor, *arguments, group=None, **options):
        if group is manager.dp_group:
            reduced.append(tensor.data_ptr())
        return original(tensor, *arguments, group=group, **options)

    data_parallel.dist.all_reduce = counting_all_reduce
    try:
        steps = []
        for _ in range(3):
            reduced.clear()
            wrapper.zero_grad()
            train_step(config, model, microbatches, manager)
            early = len(reduced)
            wrapper.finish_grad_sync()
            assert sorted(reduced) == sorted(bucket.gradients.data_ptr() for bucket in wrapper.buckets)
            steps.append((early, len(wrapper.buckets)))
        return steps
    finally:
        data_parallel.dist.all_reduce = original


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("engine, chunks", [("afab", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)])
def test_every_gradient_is_reduced_once_a_step_and_before_backward_ends(pool, engine, chunks, microbatches):
    for steps in pool.run(4, count_reductions, engine, chunks, microbatches):
        first, *later = steps
        assert first[0] == 0  # the first step counts how many gradients come
        assert all(early == buckets > 3 for early, buckets in later)  # from then on, all have started in backward


# --- modules that are not ours ---


class Odd(nn.Module):
    """A weight used twice, a frozen one, and one that no output depends on."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.unused = nn.Linear(6, 6)

    def forward(self, x):
        return self.second(torch.tanh(self.frozen(self.first(x)))).square().mean()


def train_odd(rank_independent_reference, accumulation):
    """Trains three steps on 2 ranks with different data, or on all of that data at once. Returns named values."""
    manager = pgm.setup_process_group_manager(1, 1, dist.get_world_size())
    torch.manual_seed(0)
    module = Odd().double()
    data = torch.randn(3, accumulation, 2, 5, 6, dtype=torch.float64)  # [step, micro-batch, dp rank, rows, features]
    wrapper = DataParallelBucket(module, bucket_elements=1)
    optimizer = wrapper.optimizer(weight_decay=0.1, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    gradients = {}
    for step in range(3):
        wrapper.zero_grad()
        for i in range(accumulation):
            ranks = (0, 1) if rank_independent_reference else (manager.dp_rank,)
            for rank in ranks:
                (wrapper(data[step, i, rank]) / accumulation / len(ranks)).backward()
        wrapper.finish_grad_sync()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}
        optimizer.step()
        wrapper.publish()
    return gradients, {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_tied_frozen_and_unused_parameters(pool, accumulation):
    ((expected_gradients, expected),) = pool.run(1, train_odd, True, accumulation)
    ours = pool.run(2, train_odd, False, accumulation)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(ours[0][0][name], gradient, rtol=1e-12, atol=1e-14)
        assert torch.equal(ours[0][0][name], ours[1][0][name])
    assert expected_gradients["unused.weight"].abs().max() == 0 < expected_gradients["first.weight"].abs().max()
    for name, value in expected.items():
        torch.testing.assert_close(ours[0][1][name], value, rtol=1e-12, atol=1e-14)
        assert torch.equal(ours[0][1][name], ours[1][1][name])  # replicas are bit-equal


# --- the norm ---


def norm_with_large_norm_gradients(tp, pp, dp):
    manager, config, model, wrapper = build(tp, pp, dp, tie_word_embeddings=True)
    wrapper.zero_grad()
    train_step(config, model, 4 // dp, manager)
    wrapper.finish_grad_sync()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.grad.mul_(100)
    return wrapper.clip_gradients(None).item(), wrapper.clip_gradients(0.5).item(), wrapper.clip_gradients(None).item()


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_replicated_parameters_count_once_in_the_norm(pool, layout):
    ((norm, _, clipped),) = pool.run(1, norm_with_large_norm_gradients, 1, 1, 1)
    assert clipped == pytest.approx(0.5, rel=1e-5) and norm > 1
    for ours in pool.run(layout[0] * layout[1] * layout[2], norm_with_large_norm_gradients, *layout):
        assert ours == pytest.approx((norm, norm, clipped), rel=1e-12)


# --- precision and ZeRO-1 ---


def describe_buckets(zero1, dtype):
    pgm.setup_process_group_manager(1, 1, dist.get_world_size())
    wrapper = DataParallelBucket(nn.Linear(10, 7).to(dtype), zero1)
    optimizer = wrapper.optimizer(weight_decay=0.1, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    wrapper.zero_grad()
    wrapper(torch.ones(2, 10, dtype=dtype)).sum().backward()
    wrapper.finish_grad_sync()
    optimizer.step()
    wrapper.publish()
    matrix = next(bucket for bucket in wrapper.buckets if bucket.kind.decay)
    state = optimizer.state[matrix.master]
    assert matrix.parameters[0].untyped_storage().data_ptr() == matrix.values.untyped_storage().data_ptr()
    shares_memory = matrix.master.untyped_storage().data_ptr() == matrix.values.untyped_storage().data_ptr()
    return (
        matrix.values.numel(),
        state["exp_avg"].numel(),
        state["exp_avg"].dtype,
        matrix.gradients.dtype,
        shares_memory,
    )


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_zero1_divides_the_optimizer_state(pool, dp):
    for numel, state_numel, *_ in pool.run(dp, describe_buckets, True, torch.float32):
        assert numel >= 70 and state_numel == numel // dp
    for numel, state_numel, *_ in pool.run(dp, describe_buckets, False, torch.float32):
        assert state_numel == numel


@pytest.mark.parametrize("dtype, wide", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_gradients_and_masters_are_float32_or_better(pool, dtype, wide):
    ((_, _, state_dtype, grad_dtype, shares_memory),) = pool.run(1, describe_buckets, False, dtype)
    assert (state_dtype, grad_dtype) == (wide, wide)
    assert shares_memory == (dtype == wide)  # no second copy of the weights where they are wide enough


def move_with_a_small_rate(dtype):
    """The fraction of weights that 100 steps with a learning rate of 1e-5 have moved."""
    pgm.setup_process_group_manager(1, 1, 1)
    torch.manual_seed(0)
    module = nn.Linear(64, 64, bias=False).to(dtype)
    wrapper = DataParallelBucket(module)
    optimizer = wrapper.optimizer(weight_decay=0.0, lr=1e-5, betas=(0.9, 0.999), eps=1e-8)
    before = module.weight.detach().clone()
    x = torch.randn(32, 64).to(dtype)
    for _ in range(100):
        wrapper.zero_grad()
        wrapper(x).float().square().mean().backward()
        wrapper.finish_grad_sync()
        optimizer.step()
        wrapper.publish()
    return (module.weight != before).double().mean().item()


def test_small_steps_move_bfloat16_weights(pool):
    (float32,), (bfloat16,) = (pool.run(1, move_with_a_small_rate, d) for d in (torch.float32, torch.bfloat16))
    assert float32 > 0.99 and bfloat16 > 0.9  # without float32 masters nearly none moves


def name_what_is_not_finite():
    _, config, model, wrapper = build(pp=2)
    manager = pgm.process_group_manager
    wrapper.zero_grad()
    train_step(config, model, 2, manager)
    wrapper.finish_grad_sync()
    name, parameter = list(model.named_parameters())[3]
    if manager.pp_rank == 1:
        parameter.grad.view(-1)[0] = float("inf")
    norm = wrapper.clip_gradients(0.1)
    return norm.item(), name, wrapper.where_not_finite()


def test_a_gradient_that_is_not_finite_is_named_after_clipping_too(pool):
    first, second = pool.run(2, name_what_is_not_finite)
    assert first[0] == second[0] == float("inf")
    assert first[2] == second[2] == f"not finite: the gradient of {second[1]} on rank 1"
