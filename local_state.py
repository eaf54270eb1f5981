"""What a rank has of each tensor that a checkpoint holds, and how a whole one comes together on one rank.

Tensor parallelism cuts a weight into rows or columns, and ZeRO-1 the optimizer's state of such a part into pieces. So
a whole tensor comes together in two moves, first over dp, then over tp.
"""

import itertools

import torch.distributed as dist

import process_group_manager as pgm
from model import named_parameters
from pipeline_parallel import pipeline_communicate
from tensor_parallel import shard_range


class LocalState:
    """What this rank has: a tp shard of each parameter of its stages, and a piece of that shard's optimizer state.

    The piece is all of it, except with ZeRO-1, whose slices of the flat buckets may cut through a parameter.
    """

    def __init__(self, model, data_parallel, optimizer):
        manager, self.parameters, self.pieces = pgm.process_group_manager, dict(named_parameters(model)), {}
        names = {parameter: name for name, parameter in self.parameters.items()}
        for bucket in data_parallel.buckets:
            master, state = bucket.master, optimizer.state[bucket.master]
            flats = {f"optimizer-{key}": flat for key, flat in [("master", master), *state.items()] if key != "step"}
            mine, num_slices = (manager.dp_rank, manager.dp_size) if bucket.zero1 else (0, 1)
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                name, size, length = names[parameter], parameter.numel(), master.numel()
                # cuts[r]: how many elements of the parameter lie before slice r of the bucket
                cuts = [min(max(r * length - offset, 0), size) for r in range(num_slices + 1)]
                places = [slice(*ends) for ends in itertools.pairwise(cuts)]
                first = max(offset - mine * length, 0)
                for family, flat in flats.items():
                    self.pieces[family, name] = flat[first : first + cuts[mine + 1] - cuts[mine]], places, places[mine]
                self.pieces["model", name] = parameter.detach().view(-1), [slice(0, size)], slice(0, size)

    def gather(self, family, name, dp_rank, tp_rank):
        """The whole tensor, in the memory of the rank of this stage with these coordinates; None on the others."""
        manager, parameter = pgm.process_group_manager, self.parameters[name]
        piece, places, _ = self.pieces[family, name]
        part = put_together(piece, places, [parameter.numel()], dp_rank, manager.dp_ranks, manager.dp_group)
        if manager.dp_rank != dp_rank:
            return None
        part, shard = part.view(parameter.shape), getattr(parameter, "shard", None)
        if shard is not None:
            places = [place_of(shard, rank) for rank in range(manager.tp_size)]
            part = put_together(part, places, shard.full_shape, tp_rank, manager.tp_ranks, manager.tp_group)
        return part.cpu() if manager.tp_rank == tp_rank else None


def place_of(shard, tp_rank):
    """Where in the full tensor tp rank `tp_rank` has its part, as an index."""
    ends = shard_range(shard.full_shape[shard.dim], tp_rank, pgm.process_group_manager.tp_size)
    return (slice(None),) * shard.dim + (slice(*ends),)


def put_together(piece, places, shape, target, ranks, group):
    """The tensor that has the piece of the r-th of `ranks` at places[r], on the `target`-th of them; else None."""
    if len(places) == 1:
        return piece
    whole, parts, operation = None, {target: piece}, dist.isend
    if group.rank() == target:
        whole, operation = piece.new_empty(shape), dist.irecv
        whole[places[target]] = piece
        # Rows are received where they belong. Columns are no contiguous memory and come in a copy.
        parts = {rank: whole[place].contiguous() for rank, place in enumerate(places) if rank != target}
    transfers = [(operation, part, ranks[rank]) for rank, part in parts.items() if part.numel() > 0]
    for handle in pipeline_communicate(transfers, group) if transfers else []:
        handle.wait()
    for rank, part in parts.items() if whole is not None else ():
        whole[places[rank]] = part
    return whole
