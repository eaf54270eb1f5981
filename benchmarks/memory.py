"""`--dry-run`'s memory beside that of real runs on this machine's CPU, and what each way to save memory saves.

    python benchmarks/memory.py                  # all rows, about four minutes on two cores; needs Linux and 8 GiB
    python benchmarks/memory.py zero1            # the rows with this word

A row is two steps of train.py under torchrun with gloo. "measured" is the rank with the highest peak of resident memory
above its baseline: what the same process had after set-up, before its model existed. By then it has used autograd and
the matrix library once, since they load code and take buffers when first used. Pages of files (code, and the tokens,
which every step maps some more of) do not count: they are the system's cache, and it can drop them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from plan import make_plan  # noqa: E402
from read_config import load_config  # noqa: E402

BASE = {
    "distributed": {"device": "cpu"},
    "model": {
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 257,
        "max_position_embeddings": 256,
    },
    "training": {"steps": 2, "seq_length": 256, "micro_batch_size": 2},  # Adam's moments are there from step 2 on
}
VOCABULARY_128K = "model.vocab_size=131072 model.hidden_size=256 model.num_hidden_layers=2 model.num_attention_heads=4"
PP2 = "distributed.pp_size=2 training.gradient_accumulation_steps=4 "
ROWS = {
    "one rank": "",
    "one rank, bfloat16": "model.dtype=bfloat16",
    "tp 2": "distributed.tp_size=2",
    "tp 2, sequence_parallel": "distributed.tp_size=2 distributed.sequence_parallel=true",
    "pp 2, 1f1b": PP2,
    "pp 2, 1f1b, recompute": PP2 + "model.recompute=layer",
    "pp 2, afab": PP2 + "distributed.pp_engine=afab",
    "pp 2, zb_v": PP2 + "distributed.pp_engine=zb_v",
    "dp 2": "distributed.dp_size=2",
    "dp 2, zero1": "distributed.dp_size=2 distributed.zero1=true",
    "dp 4": "distributed.dp_size=4",
    "dp 4, zero1": "distributed.dp_size=4 distributed.zero1=true",
    "tp 2 × pp 2 × dp 2, bfloat16": PP2 + "distributed.tp_size=2 distributed.dp_size=2 model.dtype=bfloat16",
    "vocabulary 128k": VOCABULARY_128K,
    "vocabulary 128k, tp 2": VOCABULARY_128K + " distributed.tp_size=2",
}


def resident(field):
    """Bytes of this process by /proc: now VmRSS, of it RssAnon its own and RssFile pages of files; at most VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def measure(path):
    """One rank of a row: bytes of its peak above the baseline; rank 0 prints those of all ranks."""
    config = load_config(path, [])
    device, train_data, _ = train.set_up(config)
    weight = torch.zeros(256, 256, dtype=getattr(torch, config.model.dtype), requires_grad=True)
    torch.autograd.backward(weight @ weight, torch.zeros_like(weight))
    torch.optim.AdamW([weight], fused=True).step()
    baseline = resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from now
    train.train(train.Run(config, device, train_data), None, device)
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, resident("VmHWM") - resident("RssFile") - baseline)
    if dist.get_rank() == 0:
        print("peaks", json.dumps(peaks), flush=True)
    dist.barrier()
    os._exit(0)


def run(overrides):
    """(bytes planned, bytes measured), each a list of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/config.json"
        Path(path).write_text(json.dumps(BASE))
        config = load_config(path, overrides.split())
        Path(path).write_text(config.model_dump_json())
        num_ranks = config.distributed.tp_size * config.distributed.pp_size * config.distributed.dp_size
        train.settle_layout(config, num_ranks)
        command = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), __file__, "--measure", path]
        # What is freed goes back to the system at once, so that resident memory is memory in use.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        process = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("peaks")]
    if not lines:
        sys.exit(process.stdout + process.stderr)
    return [rank["total"] for rank in make_plan(config)["ranks"]], json.loads(lines[0].removeprefix("peaks"))


def main():
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    print(f"{'MiB of the largest rank':34} planned  measured  planned/measured")
    for name, overrides in ROWS.items():
        if all(word in name for word in sys.argv[1:]):
            planned, measured = (max(sizes) / 2**20 for sizes in run(overrides))
            print(f"{name:34} {planned:7.0f}  {measured:8.0f}  {planned / measured:16.2f}", flush=True)


if __name__ == "__main__":
    main()
