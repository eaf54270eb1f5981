"""The grid of ranks: which process this is, and with whom it talks along each axis.

    torchrun --nproc_per_node 8 train.py --config configs/llama_1b_pp4_tp2.json   # tp 2 × pp 4 × dp 1

Every process holds one coordinate (dp_rank, pp_rank, tp_rank) of a three-dimensional grid.
`setup_process_group_manager` joins the processes and makes one process group per line of that grid; everybody else
reads the result as `pgm.process_group_manager.pp_rank` and friends. An axis of size 1 is a group of one, so code need
not ask whether it is there; where it does, it is to save work.
"""

import contextlib
import json
import os
import secrets
import shlex
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

process_group_manager = None  # the one ProcessGroupManager of this process, made by setup_process_group_manager
store = None  # the key-value store that all processes share, made by join_processes
LATE_START = timedelta(hours=2)  # how long the first rank waits for the last one to arrive
timeout = None  # of a collective in any group, set by join_processes; None: torch's own, half an hour


def rank_grid(tp_size, pp_size, dp_size):
    """All ranks as a tensor [dp, pp, tp]. Example: tp 2, pp 2, dp 1 is [[[0, 1], [2, 3]]].

    The last axis holds neighbouring ranks, which share a machine: tp comes last because it talks most (two all-reduces
    per layer and direction), pp next (one boundary tensor per micro-batch), dp first (one gradient per step,
    overlapped).
    """
    return torch.arange(dp_size * pp_size * tp_size).view(dp_size, pp_size, tp_size)


def coordinates(rank, tp_size, pp_size, dp_size):
    """[dp_rank, pp_rank, tp_rank] of a global rank."""
    return (rank_grid(tp_size, pp_size, dp_size) == rank).nonzero()[0].tolist()


def choose_device(name):
    """The torch.device of this process for `distributed.device`. Raises ValueError for "cuda" where there is none."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("distributed.device: 'cuda', but torch sees no CUDA device here; use 'auto' or 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    num_processes = max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), local_rank + 1)  # all of them see it, and at once
    if num_processes > torch.cuda.device_count():
        raise ValueError(
            f"distributed.device: {num_processes} processes on this machine need a GPU each, it has "
            f"{torch.cuda.device_count()}; lower torchrun's --nproc_per_node or use distributed.device=cpu"
        )
    return torch.device("cuda", local_rank)


def check_world_size(config, world_size):
    """One process for each place in the grid, or ValueError. Settles a dp_size of null. None: not under torchrun."""
    d, world_size = config.distributed, world_size or 1
    if d.dp_size is None:
        d.dp_size = max(1, world_size // (d.tp_size * d.pp_size))
    needed = d.tp_size * d.pp_size * d.dp_size
    if world_size != needed:
        hint = "start as many processes, or change distributed.tp_size, pp_size or dp_size"
        if "WORLD_SIZE" not in os.environ:
            hint = f"type: torchrun --nproc_per_node {needed} {shlex.join(sys.argv)}"
        grid = f"tp {d.tp_size} × pp {d.pp_size} × dp {d.dp_size} = {needed}"
        raise ValueError(f"world size {world_size} != {grid}; {hint}")


def join_processes(device, timeout_seconds, settings=None):
    """`init_process_group` for torchrun's processes, or for this one alone.

    A collective waits `timeout_seconds` for a missing rank; here the first one waits `LATE_START` for the last.
    `settings`: {name: value} that all ranks must have alike, or each raises the same ValueError.
    """
    global store, timeout
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        store = dist.HashStore()
    else:
        # Ranks come here at different times: one may have tokenised for an hour. So they wait for each other outside
        # of any collective, whose timeout then only has to cover a training step.
        shared, rank, world_size = next(dist.rendezvous("env://", timeout=LATE_START))
        store = wait_for_all(shared, rank, world_size)
        check_same_everywhere({**(settings or {}), "distributed.device": device.type}, rank, world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def wait_for_all(shared, rank, world_size):
    """The part of the store that belongs to this start of the ranks; torchrun keeps its store over --max-restarts, and
    what an earlier start left there would mislead this one. Returns when all ranks have come.
    """
    me = secrets.token_hex(8)
    if rank == 0:  # names the start, and welcomes the others when the last of them has said hello
        mine = dist.PrefixStore(me, shared)
        shared.set("start", me)
        wait_for_hellos(shared, mine, world_size)
        for other in range(1, world_size):
            mine.set(f"welcome/{other}", mine.get(f"hello/{other}"))
        return mine
    start = None
    while not is_stopped(shared):
        if (latest := shared.get("start")) != start:  # if still an earlier start's: its welcome is to another process
            start, mine = latest, dist.PrefixStore(latest.decode(), shared)
            mine.set(f"hello/{rank}", me)
        if mine.check([f"welcome/{rank}"]) and mine.get(f"welcome/{rank}").decode() == me:
            return mine
        time.sleep(0.05)


def wait_for_hellos(shared, mine, world_size):
    """Until every rank has said hello. After a minute it says who has not."""
    started, missing, is_said = time.monotonic(), range(1, world_size), False
    while missing := [rank for rank in missing if not mine.check([f"hello/{rank}"]) and not is_stopped(shared)]:
        waited, names = time.monotonic() - started, ", ".join(map(str, missing))
        if waited > LATE_START.total_seconds():
            raise ValueError(f"rank {names} did not come within {LATE_START}")
        if waited > 60 and not is_said:
            print(f"waiting for rank {names}: still busy with the data?", flush=True)
            is_said = True
        time.sleep(0.05)


def announce_stop():
    """Tells the other machines, whose ranks wait for this one to come, that it does not."""
    if store is None and int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        with contextlib.suppress(RuntimeError):  # nobody there to be told
            shared, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=5)))
            shared.set(_stopped(), str(rank))


def is_stopped(shared):
    """Raises ValueError when a rank on another machine has ended with an error before it could come."""
    if shared.check([_stopped()]):
        raise ValueError(f"rank {shared.get(_stopped()).decode()} has ended with an error, told on its own machine")
    return False


def _stopped():
    return f"stopped/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"  # the store outlives a restart


def check_same_everywhere(settings, rank, world_size):
    """Through the store, as ranks that are set up differently could not talk in any group."""
    store.set(f"settings/{rank}", json.dumps(settings))
    of_ranks = [json.loads(text) for text in store.multi_get([f"settings/{other}" for other in range(world_size)])]
    store.set(f"settings_seen/{rank}", "")
    if rank == 0:  # it may take the store along
        store.wait([f"settings_seen/{other}" for other in range(world_size)])
    for other, theirs in enumerate(of_ranks):
        for name, value in of_ranks[0].items():
            if theirs.get(name) != value:
                shown = f"rank 0 has {json.dumps(value)}, rank {other} {json.dumps(theirs.get(name))}"
                raise ValueError(f"{name} is not the same on all ranks: {shown}")


class ProcessGroupManager:
    """This process's coordinate in the grid and its groups. Needs an initialised `torch.distributed`.

    Raises ValueError when tp_size × pp_size × dp_size is not the world size.
    """

    def __init__(self, tp_size, pp_size, dp_size):
        self.world_size, self.global_rank = dist.get_world_size(), dist.get_rank()
        if self.world_size != tp_size * pp_size * dp_size:
            product = tp_size * pp_size * dp_size
            raise ValueError(f"world size {self.world_size} != tp {tp_size} × pp {pp_size} × dp {dp_size} = {product}")
        self.tp_size, self.pp_size, self.dp_size = tp_size, pp_size, dp_size

        grid = rank_grid(tp_size, pp_size, dp_size)
        self.dp_rank, self.pp_rank, self.tp_rank = coordinates(self.global_rank, tp_size, pp_size, dp_size)
        # Lines of the grid, one group a row.
        tp_lines = grid.reshape(-1, tp_size)
        pp_lines = grid.transpose(1, 2).reshape(-1, pp_size)
        dp_lines = grid.permute(1, 2, 0).reshape(-1, dp_size)
        pp_dp_planes = grid.permute(2, 0, 1).reshape(tp_size, -1)
        self.tp_group, self.tp_ranks = self._new_group(tp_lines)
        self.pp_group, self.pp_ranks = self._new_group(pp_lines)  # pp_ranks[i]: global rank of pp_rank i
        self.dp_group, self.dp_ranks = self._new_group(dp_lines)
        self.pp_dp_group, self.pp_dp_ranks = self._new_group(pp_dp_planes)
        # Tied embeddings have a copy at both ends of a pipeline; their gradients are summed over this group.
        self.embedding_group, self.embedding_ranks = self._new_group(pp_lines[:, [0, -1]] if pp_size > 1 else pp_lines)
        # For what one rank does while the others wait, however long: objects, by gloo, on GPUs too.
        self.patient_group = dist.new_group(backend="gloo", timeout=LATE_START)

    def _new_group(self, lines):
        """A group of every row, made on every rank in the same order (else: hang); returns this rank's own."""
        for ranks in lines.tolist():
            group = dist.new_group(ranks, timeout=timeout)  # it would not take over that of the world's group
            if self.global_rank in ranks:
                mine = group, ranks
        # Embedding lines leave out the middle stages; those ranks keep no group.
        return mine if (lines == self.global_rank).any() else (None, [])

    def warm_up(self, device):
        """One collective a group: nccl makes communicators at first use, which no batched p2p call may be."""
        for group in (self.tp_group, self.pp_group, self.dp_group, self.pp_dp_group, self.embedding_group):
            if group is not None:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        dist.all_reduce(torch.zeros(1, device=device))

    def __str__(self):
        return f"tp {self.tp_size} × pp {self.pp_size} × dp {self.dp_size} = {self.world_size} ranks"


def setup_process_group_manager(tp_size, pp_size, dp_size, device=torch.device("cpu")):  # noqa: B008
    """Makes the global `process_group_manager`; `join_processes` came before."""
    global process_group_manager
    process_group_manager = ProcessGroupManager(tp_size, pp_size, dp_size)
    process_group_manager.warm_up(device)
    return process_group_manager
