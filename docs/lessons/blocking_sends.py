"""Two ranks that send to each other before they receive: they wait for ever. Part of lesson 10.

torchrun --nproc_per_node 2 docs/lessons/blocking_sends.py
torchrun --nproc_per_node 2 docs/lessons/blocking_sends.py --batched
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline_parallel import pipeline_communicate  # noqa: E402

dist.init_process_group("gloo", timeout=timedelta(seconds=2))  # so long a send or a receive waits for its other end
rank, mine = dist.get_rank(), torch.ones(1_000_000)
other, theirs = 1 - rank, torch.empty(1_000_000)
try:
    if "--batched" in sys.argv:
        for handle in pipeline_communicate([(dist.isend, mine, other), (dist.irecv, theirs, other)], dist.group.WORLD):
            handle.wait()
    else:
        dist.send(mine, other)  # does not return before the other rank receives, and that does not receive: it sends
        dist.recv(theirs, other)
except RuntimeError as error:
    print(f"rank {rank}: {str(error).splitlines()[0].partition('] ')[2]}\n", end="", flush=True)
    time.sleep(1)  # the other rank tells its own story before this connection breaks
    os._exit(1)
print(f"rank {rank}: sent and received {len(theirs):,} numbers\n", end="", flush=True)
dist.barrier()
os._exit(0)
