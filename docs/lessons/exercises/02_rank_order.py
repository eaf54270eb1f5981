"""Exercise 2: number the ranks so that the stages of a pipeline are neighbours, and tp partners are far apart.

    python docs/lessons/exercises/02_rank_order.py

Looks at the grid, then lets four real processes sum their ranks over their groups.
"""

from exercise import expect, run_on_ranks

import process_group_manager as pgm


def sums_along_axes():
    """What this rank gets when the global rank numbers are summed over each of its groups."""
    import torch
    import torch.distributed as dist

    manager = pgm.setup_process_group_manager(tp_size=2, pp_size=2, dp_size=1)
    sums = []
    for group in (manager.tp_group, manager.pp_group, manager.dp_group):
        number = torch.tensor(manager.global_rank)
        dist.all_reduce(number, group=group)
        sums.append(number.item())
    return manager.tp_rank, manager.pp_rank, sums


if __name__ == "__main__":
    grid = pgm.rank_grid(tp_size=2, pp_size=4, dp_size=2)
    expect(grid.shape == (2, 4, 2), f"its axes are to be dp, pp, tp, so (2, 4, 2); they are {tuple(grid.shape)}")
    pipeline = grid[0, :, 0].tolist()
    expect(pipeline == [0, 1, 2, 3], f"tp 2 × pp 4 × dp 2: the first pipeline is {pipeline}, not [0, 1, 2, 3]")
    expect(grid[1, :, 1].tolist() == [12, 13, 14, 15], f"the last pipeline is {grid[1, :, 1].tolist()}")
    partners = grid[0, 0].tolist()
    expect(partners == [0, 4], f"rank 0's tp partners are {partners}, not [0, 4]")
    for rank, result in enumerate(run_on_ranks(4, sums_along_axes)):
        tp_rank, pp_rank = divmod(rank, 2)
        wanted = (tp_rank, pp_rank, [2 * pp_rank + 2, 4 * tp_rank + 1, rank])
        expect(result == wanted, f"rank {rank} of 4: tp rank, pp rank and sums over its groups {result}, not {wanted}")
    print("right: pipelines are 0-1-2-3, 4-5-6-7, …, and 4 processes found their groups")
