"""Two ranks that send to each other before they receive: they wait for ever. Part of lesson 10.

    torchrun --nproc_per_node 2 docs/lessons/blocking_sends.py
    torchrun --nproc_per_node 2 docs/lessons/blocking_sends.py --batched

For ever is two seconds here.
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

batched = "--batched" in sys.argv
dist.init_process_group("gloo")
dist.barrier()  # both are here: now a late start cannot be taken for a deadlock
group = dist.new_group(timeout=timedelta(seconds=60 if batched else 2))
rank, mine, theirs = dist.get_rank(), torch.ones(1_000_000), torch.empty(1_000_000)
other = 1 - rank
try:
    if batched:
        for handle in pipeline_communicate([(dist.isend, mine, other), (dist.irecv, theirs, other)], group):
            handle.wait()
    else:
        dist.send(mine, other, group)  # returns when the other rank receives; but that is sending, too
        dist.recv(theirs, other, group)
except RuntimeError:  # the time is up, or was up on the other rank a moment ago, which closed the connection
    print(f"rank {rank}: still sending after 2 seconds\n", end="", flush=True)
    time.sleep(1)  # so that both say it before torchrun ends them
    os._exit(1)
print(f"rank {rank}: sent and received {len(theirs):,} numbers\n", end="", flush=True)
dist.barrier()
os._exit(0)
