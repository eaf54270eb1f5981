"""This trainer beside what a user would pick instead: the same model, tokens and optimizer, in turn on this machine.

    python benchmarks/compare.py --work W1                    # every contender and every target, over an hour
    python benchmarks/compare.py --work W1 --only pp2 --cycles 24 --sets 2

A target compares two contenders cycle by cycle. Contenders that targets connect make a group; the groups come one after
the other. In a group every contender has its own processes, which are started and warmed up together and then take
turns: one step of each, the order reversed every cycle, the others blocked. A target is reached when the lower end of
the 90 % bootstrap interval of the median ratio clears it in every set, missed when the upper end does not, otherwise
not resolved. Losses must agree, or the work was not the same.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from statistics import median
from typing import NamedTuple

import peers
from peers import WORKS, ours, torch_pipelining


class Contender(NamedTuple):
    make: object
    ranks: int = 1
    threads: int = 1


def two_ranks(make, **options):
    return Contender(partial(make, **options), ranks=2)


CONTENDERS = {
    "plain, 1 thread": Contender(peers.plain_loop),
    "plain, 2 threads": Contender(peers.plain_loop, threads=2),
    "transformers, 1 thread": Contender(peers.transformers_loop),
    "ours, 1 thread": Contender(ours),
    "ours, 1 thread, bfloat16": Contender(partial(ours, dtype="bfloat16")),
    "ours pp2 1f1b": two_ranks(ours, pp_size=2),
    "ours pp2 1f1b, bfloat16": two_ranks(ours, pp_size=2, dtype="bfloat16"),
    "ours pp2 afab": two_ranks(ours, pp_size=2, pp_engine="afab"),
    "ours pp2 interleaved_1f1b": two_ranks(ours, pp_size=2, pp_engine="interleaved_1f1b", pp_chunks=2),
    "ours pp2 zb_h1": two_ranks(ours, pp_size=2, pp_engine="zb_h1"),
    "ours pp2 zb_v": two_ranks(ours, pp_size=2, pp_engine="zb_v"),
    "ours pp2 dualpipev": two_ranks(ours, pp_size=2, pp_engine="dualpipev"),
    "torch pp2 1F1B": two_ranks(torch_pipelining, schedule="1F1B"),
    "torch pp2 GPipe": two_ranks(torch_pipelining, schedule="GPipe"),
    "torch pp2 Interleaved1F1B": two_ranks(torch_pipelining, schedule="Interleaved1F1B", chunks=2),
    "torch pp2 InterleavedZeroBubble": two_ranks(torch_pipelining, schedule="InterleavedZeroBubble", chunks=2),
    "torch pp2 ZBVZeroBubble": two_ranks(torch_pipelining, schedule="ZBVZeroBubble", v_shape=True, chunks=2),
    "torch pp2 DualPipeV": two_ranks(torch_pipelining, schedule="DualPipeV", v_shape=True, chunks=2),
    "ours tp2": two_ranks(ours, tp_size=2),
    "ours dp2": two_ranks(ours, dp_size=2),
    "torch DDP": two_ranks(peers.torch_ddp),
}
TARGETS = [  # (ours, the other, at least so many times as fast)
    ("ours, 1 thread", "plain, 1 thread", 1.05),
    ("ours, 1 thread", "transformers, 1 thread", 1.12),
    ("ours pp2 1f1b", "torch pp2 1F1B", 1.10),
    ("ours pp2 afab", "torch pp2 GPipe", 1.05),
    ("ours pp2 interleaved_1f1b", "torch pp2 Interleaved1F1B", 1.05),
    ("ours pp2 zb_h1", "torch pp2 InterleavedZeroBubble", 1.05),
    ("ours pp2 zb_v", "torch pp2 ZBVZeroBubble", 1.05),
    ("ours pp2 dualpipev", "torch pp2 DualPipeV", 1.05),
    ("ours tp2", "plain, 2 threads", 0.90),
    ("ours dp2", "torch DDP", 1.00),
    ("ours, 1 thread, bfloat16", "ours, 1 thread", 3.0),
    ("ours pp2 1f1b, bfloat16", "ours pp2 1f1b", 3.0),
]
SPEED_UP_TARGETS = [  # (a pipeline, one process, at least so much of what its timetable promises over that)
    ("ours pp2 1f1b", "ours, 1 thread", 0.97),
]
MEMORY_TARGETS = [  # (ours, the other, at most so many times its peak)
    ("ours pp2 1f1b", "torch pp2 1F1B", 0.9),
    ("ours pp2 afab", "torch pp2 GPipe", 0.9),
]


# --- a contender's process --------------------------------------------------------------------------------------------


def serve(name, work, folder):
    """One rank of contender `name`: a step for each line of standard input, two of JSON for each step."""
    import torch
    import torch.distributed as dist

    contender, rank = CONTENDERS[name], int(os.environ["RANK"])
    torch.set_num_threads(contender.threads)
    options = {"init_method": f"file://{folder}/rendezvous", "rank": rank, "world_size": contender.ranks}
    dist.init_process_group("gloo", **options)
    step = contender.make(WORKS[work], rank)
    for number in range(10**9):
        if not sys.stdin.readline():
            os._exit(0)
        print(json.dumps({"loss": step(number)}), flush=True)  # the step ends here
        peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        speed_up = getattr(step, "speed_up", None)
        print(json.dumps({"peak": 1024 * int(peak.split()[1]), "speed_up": speed_up and speed_up()}), flush=True)


class Runner:
    """The processes of one contender."""

    def __init__(self, name, work, folder):
        self.losses, self.peaks, self.speed_ups = [], [], []
        os.mkdir(folder)
        command = [sys.executable, __file__, "--serve", name, "--work", work, "--folder", folder]
        threads, ranks = str(CONTENDERS[name].threads), CONTENDERS[name].ranks
        self.processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": threads},
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def step(self):
        """Seconds of one step, from the word to the last rank's answer."""
        started = time.perf_counter()
        for process in self.processes:
            process.stdin.write("step\n")
            process.stdin.flush()
        losses = [process.stdout.readline() for process in self.processes]
        seconds = time.perf_counter() - started
        others = [process.stdout.readline() for process in self.processes]
        if not all(others):
            sys.exit("a contender died, see above")
        others = [json.loads(answer) for answer in others]
        self.losses.append(json.loads(losses[0])["loss"])
        self.peaks = [answer["peak"] for answer in others]
        self.speed_ups.append(others[0]["speed_up"])
        return seconds

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


# --- the comparison ---------------------------------------------------------------------------------------------------


def groups_of(names):
    """`names` in groups, such that the two of a target are in one: no more need to be in memory at once."""
    groups = [[name] for name in names]
    for one, other, _ in TARGETS + SPEED_UP_TARGETS:
        if one in names and other in names:
            connected = [group for group in groups if one in group or other in group]
            merged = [name for name in names if any(name in group for group in connected)]
            groups[groups.index(connected[0])] = merged
            groups = [group for group in groups if group not in connected]
    return groups


def run_set(names, work, cycles):
    """{name: {"seconds": one of each cycle, "peak": bytes of the largest rank, "speed_ups": promised each cycle}}"""
    with tempfile.TemporaryDirectory() as folder:
        runners = {name: Runner(name, work, f"{folder}/{i}") for i, name in enumerate(names)}
        try:
            for runner in runners.values():  # warm-up: what a first step builds, and the optimizer's state
                runner.step(), runner.step()
                runner.speed_ups.clear()
            seconds = {name: [] for name in names}
            for cycle in range(cycles):
                for name in names if cycle % 2 == 0 else reversed(names):
                    seconds[name].append(runners[name].step())
                print(f"cycle {cycle + 1} of {cycles}", end="\r", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            check_losses(runners)
            return {
                name: {"seconds": seconds[name], "peak": max(runner.peaks), "speed_ups": runner.speed_ups}
                for name, runner in runners.items()
            }
        finally:
            for runner in runners.values():
                runner.close()


expected_losses = []  # those of the first contender that ran


def check_losses(runners):
    expected_losses[:] = expected_losses or next(iter(runners.values())).losses
    for name, runner in runners.items():
        tolerance = 0.01 if "bfloat16" in name else 1e-3
        for step, (loss, expected) in enumerate(zip(runner.losses, expected_losses, strict=True), start=1):
            if abs(loss - expected) > tolerance * expected:
                sys.exit(f"{name}: loss {loss} at step {step}, the others have {expected}: not the same work")


def interval(ratios, samples=2000):
    """The 90 % bootstrap interval of the median of `ratios`."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[samples // 20], medians[-1 - samples // 20]


def verdict(intervals, target):
    if all(low >= target for low, _ in intervals):
        return "reached"
    return "missed" if all(high < target for _, high in intervals) else "not resolved"


def compare(sets):
    """One row per target whose two contenders ran: the median ratios of speed with their intervals."""
    rows = []
    for one, other, target in TARGETS + SPEED_UP_TARGETS:
        if one not in sets[0] or other not in sets[0]:
            continue
        promised = (one, other, target) in SPEED_UP_TARGETS
        ratios = [
            [
                b / a / (speed_up if promised else 1)
                for a, b, speed_up in zip(
                    results[one]["seconds"], results[other]["seconds"], results[one]["speed_ups"], strict=True
                )
            ]
            for results in sets
        ]
        intervals = [interval(of_set) for of_set in ratios]
        medians = [median(of_set) for of_set in ratios]
        label = f"{other} × timetable" if promised else other
        row = {"ours": one, "other": label, "target": target, "ratios": medians, "intervals": intervals}
        rows.append(row | {"verdict": verdict(intervals, target)})
    return rows


def report(sets, rows):
    print(f"\n{'':32}seconds a step, median of each set    peak GiB of a rank")
    for name in sets[0]:
        seconds = "  ".join(f"{median(results[name]['seconds']):8.3f}" for results in sets)
        print(f"{name:32}{seconds:32}{max(results[name]['peak'] for results in sets) / 2**30:12.2f}")
    if rows:
        print("times as fast as, median of the ratios in the same cycle (90 % interval) of each set")
    for row in rows:
        figures = [
            f"{ratio:.3f} ({low:.3f}, {high:.3f})"
            for ratio, (low, high) in zip(row["ratios"], row["intervals"], strict=True)
        ]
        target = f"at least {row['target']:.2f}: {row['verdict']}"
        print(f"{row['ours']:28}{row['other']:33}{'   '.join(figures)}   {target}", flush=True)
    for one, other, target in MEMORY_TARGETS:
        if one in sets[0] and other in sets[0]:
            ratio = max(results[one]["peak"] / results[other]["peak"] for results in sets)
            reached = "reached" if ratio <= target else "missed"
            print(f"{one:28}{other:33}{ratio:.3f} of its peak memory   at most {target}: {reached}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, default="W1")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="contenders whose names have one of these"
    )
    parser.add_argument("--without", nargs="*", default=[], metavar="WORD", help="but not those with one of these")
    parser.add_argument("--cycles", type=int, default=24)
    parser.add_argument("--sets", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="a line for each group")
    parser.add_argument("--serve", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.work, arguments.folder)
    names = [
        name
        for name in CONTENDERS
        if (not arguments.only or any(word in name for word in arguments.only))
        and not any(word in name for word in arguments.without)
    ]
    for group in groups_of(names):
        sets = [run_set(group, arguments.work, arguments.cycles) for _ in range(arguments.sets)]
        rows = compare(sets)
        if arguments.json:
            print(json.dumps({"work": arguments.work, "sets": sets, "targets": rows}), flush=True)
        else:
            report(sets, rows)


if __name__ == "__main__":
    main()
