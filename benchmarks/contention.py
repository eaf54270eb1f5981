"""How much slower two independent trainers are at once than one after the other: what a pipeline of two loses as well.

    python benchmarks/contention.py --work W1 --cycles 8      # on two cores

Two processes with one thread each train a model of their own and share nothing but the machine. A cycle is a step of
the first, a step of the second, then a step of both at once; the ratio is the slower of both over the mean alone.
"""

import argparse
import multiprocessing
import os
import statistics
import time


def serve(work, pipe):
    """A step for each message, answered by its seconds."""
    os.environ.update(WORLD_SIZE="1", RANK="0", OMP_NUM_THREADS="1")
    import torch.distributed as dist
    from peers import WORKS, ours

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    step = ours(WORKS[work], 0)
    for number in range(10**9):
        pipe.recv()
        started = time.perf_counter()
        step(number)
        pipe.send(time.perf_counter() - started)


def seconds(*pipes):
    """Of one step of these trainers, all at once."""
    for pipe in pipes:
        pipe.send("step")
    return [pipe.recv() for pipe in pipes]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="W1", help="W1 or W2, see compare.py")
    parser.add_argument("--cycles", type=int, default=8)
    arguments = parser.parse_args()
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for _ in range(2):
        pipe, other = context.Pipe()
        processes.append(context.Process(target=serve, args=(arguments.work, other)))
        processes[-1].start()
        pipes.append(pipe)
    seconds(*pipes), seconds(*pipes)  # warm-up
    ratios = []
    for _ in range(arguments.cycles):
        alone = seconds(pipes[0]) + seconds(pipes[1])
        ratios.append(max(seconds(*pipes)) / statistics.mean(alone))
    for process in processes:
        process.kill()
    print(f"at once / alone: {statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})")


if __name__ == "__main__":
    main()
