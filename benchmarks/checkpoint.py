"""Saving and loading a checkpoint beside torch.save and torch.load of the same tensors, on this machine's CPU and disk.

    python benchmarks/checkpoint.py [--folder /mnt/disk] [--rounds 5]    # some minutes; 10 GiB of memory, 7 GB of disk
    torchrun --nproc_per_node 2 benchmarks/checkpoint.py                 # tp 2

The tensors are those of configs/llama_1b_pp4_tp2.json with 2 of its 22 layers: 219 million bfloat16 weights, and their
float32 masters and moments, 3.1 GB. In every round all four functions run in turn; the table has the medians. Beside
our checkpoint, one folder for all ranks with checksums, each rank calls torch.save for a file with what it has itself,
and waits for the disk, as we do. torch.load reads that into new tensors and copies them to the old. All loading is from
the page cache. Peaks are resident memory above that before the call, of the rank with most; a mapped file counts.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import failure  # noqa: E402
import train  # noqa: E402
from benchmarks.memory import resident  # noqa: E402
from checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from checkpoint_folder import find_checkpoint  # noqa: E402
from local_state import LocalState  # noqa: E402
from log import say  # noqa: E402
from read_config import load_config  # noqa: E402
from run import Run  # noqa: E402

OVERRIDES = "model.num_hidden_layers=2 distributed.pp_size=1 distributed.device=cpu"


def functions(run, folder):
    """{name: function} in the order of a round."""
    parts = (run.model, run.data_parallel, run.optimizer)
    ours, theirs = folder / "ours", folder / f"rank_{dist.get_rank()}.pt"
    tensors = {" ".join(key): piece for key, (piece, *_) in LocalState(*parts).pieces.items()}

    def torch_save():
        with open(theirs, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load():
        for key, tensor in torch.load(theirs).items():
            tensors[key].copy_(tensor)

    return {
        "save": lambda: save_checkpoint(ours, *parts, {"step": 1}),
        "torch.save": torch_save,
        "load": lambda: load_checkpoint(find_checkpoint("auto", ours), *parts),
        "torch.load": torch_load,
    }


def measure(run, folder, rounds):
    """{name: [[seconds, peak bytes] of each round]}, the largest of all ranks."""
    results = {}
    for _ in range(rounds):
        for name, function in functions(run, folder).items():
            if "save" in name and dist.get_rank() == 0:
                for left in folder.glob("ours" if name == "save" else "rank_*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            dist.barrier()
            before, started = resident("VmRSS"), time.perf_counter()
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from now
            function()
            dist.barrier()
            largest = torch.tensor([time.perf_counter() - started, resident("VmHWM") - before], dtype=torch.float64)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            results.setdefault(name, []).append(largest.tolist())
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = load_config(str(ROOT / "configs" / "llama_1b_pp4_tp2.json"), OVERRIDES.split())
    config.distributed.tp_size = int(os.environ.get("WORLD_SIZE", 1))
    device, train_data, _ = train.set_up(config)
    run = Run(config, device, train_data)
    run.optimizer.step()  # so that there are moments
    folder = [tempfile.mkdtemp(dir=arguments.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        results = measure(run, Path(folder[0]), arguments.rounds)
    finally:
        shutil.rmtree(folder[0], ignore_errors=True)
    say(f"{'':5}{'seconds':>9}{'torch':>8}{'ratio':>7}{'peak MiB':>11}{'torch':>8}")
    for name in ("save", "load"):
        ours, theirs = results[name], results[f"torch.{name}"]
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(ours, theirs, strict=True))
        (seconds, peak), (their_seconds, their_peak) = (
            map(statistics.median, zip(*of_rounds, strict=True)) for of_rounds in (ours, theirs)
        )
        say(f"{name:5}{seconds:9.2f}{their_seconds:8.2f}{ratio:7.2f}{peak / 2**20:11.0f}{their_peak / 2**20:8.0f}")
    sys.stdout.flush()
    failure.ending = True
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
