"""The pool of processes that the other tests stand on: right results, reuse, a true report of every kind of failure."""

import multiprocessing
import os
import pickle
import select
import signal
import time

import pytest
import torch
import torch.distributed as dist

import process_group_manager as pgm
from workers import WorkerError, WorkerPool


def sum_over_ranks():
    """Each rank's place as the environment and as torch tell it, and an all-reduce of rank + 1."""
    value = torch.tensor(dist.get_rank() + 1.0, dtype=torch.float64)
    dist.all_reduce(value)
    places = [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    return value, places, [dist.get_rank(), dist.get_rank(), dist.get_world_size()]


def echo(value):
    return value


def random_number():
    return torch.rand(()).item()


def leave_traces():
    pgm.process_group_manager = "left over"
    torch.set_default_dtype(torch.float64)
    return random_number()


def hold_a_group_in_a_cycle():
    cycle = [dist.new_group([0, 1])]
    cycle.append(cycle)


def num_open_files():
    return len(os.listdir("/dev/fd"))


def traces():
    return pgm.process_group_manager, torch.get_default_dtype(), torch.get_num_threads()


def fail_on(bad_rank, seconds_to_report=0.0):
    """All ranks but one wait in a collective; that one leaves the group, and raises a little later."""
    if dist.get_rank() == bad_rank:
        dist.destroy_process_group()
        time.sleep(seconds_to_report)
        raise ValueError("the reason")
    dist.all_reduce(torch.ones(()))


def exit_politely():
    raise SystemExit("no more")


def die_on(bad_rank, how):
    if dist.get_rank() == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL) if how == "SIGKILL" else os._exit(3)
    dist.all_reduce(torch.ones(()))


def oversleep_on(bad_rank):
    if dist.get_rank() == bad_rank:
        time.sleep(60)
    dist.all_reduce(torch.ones(()))


def orphan_workers():
    WorkerPool().run(3, echo, None)
    os.kill(os.getpid(), signal.SIGKILL)


def assert_works(pool):
    assert pool.run(2, echo, "fine") == ["fine", "fine"]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_all_reduce(pool, world_size):
    results = pool.run(world_size, sum_over_ranks)
    assert len(results) == world_size
    for rank, (value, places, torch_places) in enumerate(results):
        assert value.item() == world_size * (world_size + 1) / 2
        assert places == torch_places == [rank, rank, world_size]


def test_workers_are_used_again(pool):
    pids = pool.run(4, os.getpid)
    assert len({*pids, os.getpid()}) == 5
    assert pool.run(2, os.getpid) == pids[:2]
    assert pool.run(8, os.getpid)[:4] == pids


def test_tensors_travel_unchanged_and_unshared(pool):
    sent = {
        "view": torch.arange(6.0).view(2, 3).t(),
        "bf16": [torch.tensor([1.5, -0.0], dtype=torch.bfloat16)],
        "weight": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "big": torch.arange(500_000),  # more than a pipe holds
    }
    for received in pool.run(2, echo, sent):
        assert received.keys() == sent.keys()
        torch.testing.assert_close(received, sent, rtol=0, atol=0)
        assert received["weight"].requires_grad
        assert not received["big"].is_shared()


def test_a_test_leaves_no_traces_for_the_next(pool):
    first = pool.run(2, leave_traces)
    assert pool.run(2, traces) == [(None, torch.float32, 1)] * 2
    assert first[0] == first[1]
    assert pool.run(2, leave_traces) == first


def test_groups_do_not_pile_up_in_the_workers(pool):
    num_before = pool.run(2, num_open_files)
    for _ in range(3):
        pool.run(2, hold_a_group_in_a_cycle)
    assert pool.run(2, num_open_files) == num_before


def test_many_runs(pool):
    for _ in range(20):
        assert [value.item() for value, _, _ in pool.run(4, sum_over_ranks)] == [10.0] * 4


def test_exception_on_one_rank_is_reported(pool):
    pids = pool.run(2, os.getpid)
    with pytest.raises(WorkerError, match=r"(?s)^rank 2 of 4 raised.*in fail_on.*ValueError: the reason"):
        pool.run(4, fail_on, 2)
    assert set(pids).isdisjoint(pool.run(2, os.getpid))


def test_the_cause_is_reported_not_its_echo(pool):
    # Rank 0 loses its connection half a second before rank 1 says why.
    with pytest.raises(WorkerError, match=r"(?s)^rank 1 of 2 raised.*ValueError: the reason"):
        pool.run(2, fail_on, 1, 0.5)
    assert_works(pool)


def test_sys_exit_is_an_exception_too(pool):
    with pytest.raises(WorkerError, match=r"(?s)rank [01] of 2 raised.*SystemExit: no more"):
        pool.run(2, exit_politely)
    assert_works(pool)


@pytest.mark.parametrize("how", ["SIGKILL", "exit code 3"])
def test_a_dead_worker_is_reported_at_once(pool, how):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"^rank 1 of 4 died: {how}$"):
        pool.run(4, die_on, 1, how, timeout=60)
    assert time.monotonic() - start < 20
    assert_works(pool)


def test_a_worker_that_died_between_two_runs_is_reported(pool):
    os.kill(pool.run(2, os.getpid)[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1 of 2 died: SIGKILL"):
        pool.run(2, echo, "unheard", timeout=60)
    assert_works(pool)


def test_a_hang_is_reported_with_the_place_of_each_rank(pool):
    start = time.monotonic()
    with pytest.raises(WorkerError) as error:
        pool.run(2, oversleep_on, 1, timeout=2)
    assert time.monotonic() - start < 20
    rank_0, rank_1 = str(error.value).split("rank 1 of 2 did not return in 2 s")
    assert rank_0.startswith("rank 0 of 2 did not return in 2 s") and "in all_reduce" in rank_0
    assert "in oversleep_on" in rank_1
    assert_works(pool)


def test_a_function_that_cannot_travel_is_refused_before_anything_starts(pool):
    pids = pool.run(2, os.getpid)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.run(2, lambda: None)
    assert pool.run(2, os.getpid) == pids


def test_workers_do_not_outlive_their_parent():
    readable, writable = os.pipe()  # reads as closed when the parent and all its workers, which inherit it, are gone
    parent = multiprocessing.get_context("fork").Process(target=orphan_workers)
    parent.start()
    os.close(writable)
    parent.join()
    assert parent.exitcode == -signal.SIGKILL
    assert select.select([readable], [], [], 10)[0]
    os.close(readable)
