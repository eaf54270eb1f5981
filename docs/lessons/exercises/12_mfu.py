"""Exercise 12: `--dry-run` tells the MFU that no kernel and no network could beat: "mfu_limit".

    python docs/lessons/exercises/12_mfu.py

Compares the figure with ones worked out by hand.
"""

from exercise import ROOT, expect

from plan import make_plan
from read_config import load_config
from stages import settle_stages


def limit(file, *overrides):
    config = load_config(f"{ROOT}/configs/{file}", list(overrides))
    settle_stages(config)
    plan = make_plan(config)
    expect("mfu_limit" in plan, 'make_plan gives no "mfu_limit"')
    return plan["mfu_limit"]


cases = {  # no pipeline, no waiting: all of the time is the model's own FLOPs, but for those that are done again
    ("tiny_1gpu.json",): 1,
    ("tiny_1gpu.json", "model.recompute=layer"): 3 / 4,
    ("tiny_1gpu.json", "model.recompute=2"): 3 / 3.5,
}
for arguments, wanted in cases.items():
    found = limit(*arguments)
    expect(abs(found - wanted) < 1e-12, f"{' '.join(arguments)}: mfu_limit {found:.4f}, expected {wanted:.4f}")
# 405B: 126 layers and a head of 0.81 on 16 ranks, the slowest has 8; the bubble is 15 / (8 · 16) of the busy time
balance = limit("llama_405b_16k.json", "model.recompute=none")
wanted = (126 + 0.81) / 16 / 8 / (1 + 15 / 128)
expect(abs(balance - wanted) < 0.001, f"405B without recomputation: mfu_limit {balance:.4f}, expected {wanted:.4f}")
print(f"right: 405B without recomputation {balance:.1%}, with it {limit('llama_405b_16k.json'):.1%}")
