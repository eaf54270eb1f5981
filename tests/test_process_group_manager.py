"""The grid of ranks: who is where, who is in a group with whom, and how the processes of torchrun find each other."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import process_group_manager as pgm
import rendezvous
from process_group_manager import choose_device, rank_grid
from rendezvous import join_processes

CPU = torch.device("cpu")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
GROUPS = ("tp", "pp", "dp", "pp_dp", "embedding")

# ---- on every rank ---------------------------------------------------------------------------------------------------


def describe_rank(tp_size, pp_size, dp_size):
    """(dp_rank, pp_rank, tp_rank), and of each group the members as its attribute, torch and a collective tell them."""
    manager = pgm.setup_process_group_manager(tp_size, pp_size, dp_size)
    assert pgm.process_group_manager is manager
    assert (manager.tp_size, manager.pp_size, manager.dp_size) == (tp_size, pp_size, dp_size)
    assert (manager.world_size, manager.global_rank) == (dist.get_world_size(), dist.get_rank())
    members = {}
    for name in GROUPS:
        group, ranks = getattr(manager, f"{name}_group"), getattr(manager, f"{name}_ranks")
        members[name] = ranks, *((dist.get_process_group_ranks(group), meet(group)) if group else (None, None))
    return (manager.dp_rank, manager.pp_rank, manager.tp_rank), members


def meet(group):
    """The global ranks of a group's members, as they themselves say in a collective."""
    gathered = [torch.tensor(-1) for _ in range(group.size())]
    dist.all_gather(gathered, torch.tensor(dist.get_rank()), group=group)
    return torch.stack(gathered).tolist()


def world_size_error(*sizes):
    with pytest.raises(ValueError) as error:
        pgm.setup_process_group_manager(*sizes)
    assert pgm.process_group_manager is None
    return str(error.value)


def line_for_the_log(*sizes):
    return str(pgm.setup_process_group_manager(*sizes))


def join_alone():
    """As without torchrun: none of its variables, one process."""
    dist.destroy_process_group()  # the pool's
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    join_processes(choose_device("auto"), timeout_seconds=5)
    return (dist.get_backend(), dist.get_rank(), dist.get_world_size()), describe_rank(1, 1, 1)


# ---- the grid --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp, pp, dp, grid", [
    (1, 1, 1, [[[0]]]),
    (2, 1, 1, [[[0, 1]]]),
    (1, 2, 1, [[[0], [1]]]),
    (1, 1, 2, [[[0]], [[1]]]),
    (2, 2, 1, [[[0, 1], [2, 3]]]),
    (2, 1, 2, [[[0, 1]], [[2, 3]]]),
    (1, 2, 2, [[[0], [1]], [[2], [3]]]),
    (2, 2, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    (2, 4, 1, [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
    (4, 1, 2, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
    (3, 2, 1, [[[0, 1, 2], [3, 4, 5]]]),
])  # fmt: skip
def test_tp_ranks_are_neighbours_then_pp_then_dp(tp, pp, dp, grid):
    assert rank_grid(tp, pp, dp).tolist() == grid


# (tp, pp, dp): the lines of the grid along each axis, and the planes and ends that have a group of their own.
GRIDS = {
    (2, 2, 2): {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "pp_dp": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "embedding": [[0, 2], [1, 3], [4, 6], [5, 7]],
    },
    (2, 4, 1): {  # the stages in the middle have no embedding
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pp": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "dp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "pp_dp": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "embedding": [[0, 6], [1, 7]],
    },
    (1, 3, 2): {  # a size that is no power of two
        "tp": [[0], [1], [2], [3], [4], [5]],
        "pp": [[0, 1, 2], [3, 4, 5]],
        "dp": [[0, 3], [1, 4], [2, 5]],
        "pp_dp": [[0, 1, 2, 3, 4, 5]],
        "embedding": [[0, 2], [3, 5]],
    },
    (4, 1, 1): {
        "tp": [[0, 1, 2, 3]],
        "pp": [[0], [1], [2], [3]],
        "dp": [[0], [1], [2], [3]],
        "pp_dp": [[0], [1], [2], [3]],
        "embedding": [[0], [1], [2], [3]],
    },
    (1, 1, 1): {name: [[0]] for name in GROUPS},
}


@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: "tp{} pp{} dp{}".format(*sizes))
def test_every_group_has_the_members_of_its_line(pool, sizes):
    tp, pp, dp = sizes
    results = pool.run(tp * pp * dp, describe_rank, *sizes)
    # By rank, tp turns fastest and dp slowest.
    assert [place for place, _ in results] == [(d, p, t) for d in range(dp) for p in range(pp) for t in range(tp)]
    for rank, (_, members) in enumerate(results):
        for name, lines in GRIDS[sizes].items():
            mine = [line for line in lines if rank in line]
            expected = (mine[0],) * 3 if mine else ([], None, None)
            assert members[name] == expected, f"{name} group of rank {rank}"


@pytest.mark.parametrize("world_size, sizes, message", [
    (3, (1, 2, 1), "world size 3 != tp 1 × pp 2 × dp 1 = 2"),
    (2, (2, 2, 1), "world size 2 != tp 2 × pp 2 × dp 1 = 4"),
    (1, (1, 1, 2), "world size 1 != tp 1 × pp 1 × dp 2 = 2"),
])  # fmt: skip
def test_a_wrong_world_size_is_an_error_with_all_the_numbers(pool, world_size, sizes, message):
    assert pool.run(world_size, world_size_error, *sizes) == [message] * world_size


def test_the_log_says_what_the_grid_is(pool):
    assert pool.run(2, line_for_the_log, 1, 2, 1) == ["tp 1 × pp 2 × dp 1 = 2 ranks"] * 2


# ---- the device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_without_cuda_the_device_is_the_cpu(name):
    assert choose_device(name) == CPU


def test_cuda_where_there_is_none_is_an_error_that_says_what_to_use():
    with pytest.raises(ValueError) as error:
        choose_device("cuda")
    expected = "distributed.device: 'cuda', but torch sees no CUDA device here; use 'auto' or 'cpu'"
    assert str(error.value) == expected


def test_more_processes_than_gpus_is_an_error_on_all_of_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for local_rank in ("0", "7"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(ValueError, match="8 processes on this machine need a GPU each, it has 4; lower torchrun's"):
            choose_device("auto")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == torch.device("cuda", 3)


# ---- processes that find each other ----------------------------------------------------------------------------------


def test_who_does_not_come_is_named(monkeypatch):
    store = dist.HashStore()
    store.set("hello/1", "")
    monkeypatch.setattr(rendezvous, "LATE_START", timedelta(0))
    with pytest.raises(ValueError, match="rank 2, 3 did not come within 0:00:00"):
        rendezvous.wait_for_hellos(store, store, 4)


def test_one_process_needs_no_torchrun(pool):
    [(joined, (place, members))] = pool.run(1, join_alone)
    assert joined == ("gloo", 0, 1)
    assert place == (0, 0, 0)
    assert members == {name: ([0], [0], [0]) for name in GROUPS}


LATE_RANK = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from process_group_manager import choose_device
from rendezvous import join_processes

rank, first_is_there, first_is_done = int(os.environ["RANK"]), Path(sys.argv[1]), Path(sys.argv[2])
if rank == 0:
    first_is_there.touch()
else:
    while not first_is_there.exists():
        time.sleep(0.1)
    time.sleep(3)
join_processes(choose_device("auto"), timeout_seconds=2)
total = torch.tensor(rank + 1)
dist.all_reduce(total)
outcome = "absent"
if rank == 0:  # alone in the next collective
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        outcome = "timed out after 2 s" if "2000ms" in str(error) else repr(error)
    first_is_done.touch()
else:
    while not first_is_done.exists():
        time.sleep(0.1)
print(f"rank {rank} of {dist.get_world_size()}: {dist.get_backend()}, sum {total}, {outcome}\\n", end="", flush=True)
os._exit(0)  # gloo may abort the process in an ordinary exit after a collective that failed
"""


def test_a_rank_may_come_later_than_a_collective_may_take(tmp_path):
    """Rank 0 waits 3 s for rank 1 to join, and only 2 s for it in a collective."""
    script = tmp_path / "late_rank.py"
    script.write_text(LATE_RANK)
    completed = subprocess.run(
        # --standalone: on a free port; the default one may be taken
        [*TORCHRUN, "--standalone", "--nproc_per_node", "2", script, tmp_path / "there", tmp_path / "done"],
        env={**os.environ, "PYTHONPATH": str(Path(pgm.__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    assert sorted(completed.stdout.splitlines()) == [
        "rank 0 of 2: gloo, sum 3, timed out after 2 s",
        "rank 1 of 2: gloo, sum 3, absent",
    ]
