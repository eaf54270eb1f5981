"""The grid of ranks: which process this is, and with whom it talks along each axis.

    torchrun --nproc_per_node 8 train.py --config configs/llama_1b_pp4_tp2.json   # tp 2 × pp 4 × dp 1

Every process holds one coordinate (dp_rank, pp_rank, tp_rank) of a three-dimensional grid.
`setup_process_group_manager` joins the processes and makes one process group per line of that grid; everybody else
reads the result as `pgm.process_group_manager.pp_rank` and friends. An axis of size 1 is a group of one: no code asks
whether it is there.
"""

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


def choose_device(name):
    """The torch.device of this process for `distributed.device`. Raises ValueError for "cuda" where there is none."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("distributed.device: 'cuda', but torch sees no CUDA device here; use 'auto' or 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"distributed.device: local rank {local_rank} needs a GPU of its own, this machine has "
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


def join_processes(device, timeout_seconds):
    """`init_process_group` for torchrun's processes, or for this one alone. Collectives time out, arriving does not."""
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
        names = [mine.get(f"hello/{other}") for other in range(1, world_size)]
        for other, name in enumerate(names, start=1):
            mine.set(f"welcome/{other}", name)
        return mine
    start = None
    while True:
        if (latest := shared.get("start")) != start:  # if still an earlier start's: its welcome is to another process
            start, mine = latest, dist.PrefixStore(latest.decode(), shared)
            mine.set(f"hello/{rank}", me)
        if mine.check([f"welcome/{rank}"]) and mine.get(f"welcome/{rank}").decode() == me:
            return mine
        time.sleep(0.05)


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
        self.dp_rank, self.pp_rank, self.tp_rank = (grid == self.global_rank).nonzero()[0].tolist()
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


def check_same_everywhere(value, what):
    """Raises the same ValueError on all ranks unless all of them have the same `value`."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ValueError(f"{what} is not the same on all ranks: rank {rank} has another than rank 0")
