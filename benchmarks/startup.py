"""From torchrun to the first step's line: train.py beside a script with torch.distributed.pipelining.

    python benchmarks/startup.py [--ranks 2] [--cycles 10]

Both train a tiny Llama with 1F1B, one stage a rank, and are started in turn (the order reversed every cycle). The
script of the other side imports nothing but torch. Medians, and the median of the ratios with its 90 % interval.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from copy import copy
from statistics import median

import peers
from compare import interval

ROOT = peers.ROOT
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def work_for(ranks):
    work = copy(peers.WORKS["tiny"])
    work.layers, work.micro_batches = ranks, 2 * ranks
    work.vocab_size, work.same_weights = 512, False  # the byte tokenizer's 257 fit in; each side draws its own weights
    return work


def peer():
    """What torchrun starts on the other side."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss = peers.torch_pipelining(work_for(dist.get_world_size()), dist.get_rank(), "1F1B")(0)
    if dist.get_rank() == 0:
        print(f"step 1 loss {loss}", flush=True)
    dist.barrier()
    os._exit(0)


def seconds_to_first_step(command):
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        seconds = next((time.perf_counter() - started for line in process.stdout if line.startswith("step ")), None)
        process.stdout.read()
    if seconds is None or process.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer()
    ranks = str(arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        config = peers.our_config(work_for(arguments.ranks), pp_size=arguments.ranks)
        config["training"]["steps"] = 1
        with open(f"{folder}/config.json", "w") as file:
            json.dump(config, file)
        commands = {
            "train.py": [*TORCHRUN, ranks, "train.py", "--config", f"{folder}/config.json"],
            "torch.distributed.pipelining": [*TORCHRUN, ranks, __file__, "--peer"],
        }
        for command in commands.values():  # warm-up: the files come into memory, the data is prepared
            seconds_to_first_step(command)
        seconds = {name: [] for name in commands}
        for cycle in range(arguments.cycles):
            for name in commands if cycle % 2 == 0 else reversed(commands):
                seconds[name].append(seconds_to_first_step(commands[name]))
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    for name, of_name in seconds.items():
        print(f"{name:30} {median(of_name):6.2f} s")
    low, high = interval(ratios)
    print(f"train.py takes {median(ratios):.3f} ({low:.3f}, {high:.3f}) times as long")


if __name__ == "__main__":
    main()
