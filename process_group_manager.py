"""The grid of ranks: which process this is, and with whom it talks along each axis.

    torchrun --nproc_per_node 8 train.py --config configs/llama_1b_pp4_tp2.json   # tp 2 × pp 4 × dp 1

Every process holds one coordinate (dp_rank, pp_rank, tp_rank) of a three-dimensional grid.
`setup_process_group_manager` makes one process group per line of that grid (rendezvous.py came before); everybody else
reads the result as `pgm.process_group_manager.pp_rank` and friends. An axis of size 1 is a group of one, so code need
not ask whether it is there; where it does, it is to save work.
"""

import os
import shlex
import sys

import torch
import torch.distributed as dist

import rendezvous

process_group_manager = None  # the one ProcessGroupManager of this process, made by setup_process_group_manager


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
        self.patient_group = dist.new_group(backend="gloo", timeout=rendezvous.LATE_START)

    def _new_group(self, lines):
        """A group of every row, made on every rank in the same order (else: hang); returns this rank's own."""
        for ranks in lines.tolist():
            group = dist.new_group(
                ranks, timeout=rendezvous.timeout
            )  # it would not take over that of the world's group
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
    """Makes the global `process_group_manager`; `rendezvous.join_processes` came before."""
    global process_group_manager
    process_group_manager = ProcessGroupManager(tp_size, pp_size, dp_size)
    process_group_manager.warm_up(device)
    return process_group_manager
