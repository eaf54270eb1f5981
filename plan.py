"""What a run takes, before it runs: `--dry-run`, without processes, GPU, data or model.

    python train.py --config configs/llama_405b_16k.json --dry-run --memory 80GB
    python train.py --config configs/llama_1b_pp4_tp2.json --dry-run distributed.pp_layers=balanced

The figures are derived, in `stage_memory.py` and here; benchmarks/memory.py holds them against real runs.
"""

import json
import re
from itertools import permutations, product

from find_schedule import chunks_of, find_schedule
from log import flops_per_token
from read_config import unmet
from schedules import SCHEDULES
from stage_memory import Sizes, Stage, actions_and_sends, rank_memory
from stages import explain_stages, layers_of_stages, settle_stages, timetable_of, work_of_ranks

GIB = 2**30


# --- the plan ---------------------------------------------------------------------------------------------------------


def make_plan(config):
    """All figures of a settled config; memory and what is sent in bytes."""
    d, t, m = config.distributed, config.training, config.model
    work, recomputed = work_of_ranks(config), Sizes(config).recomputed_share
    # In units of a forward: backward takes two, and one more where it recomputes.
    timetable = timetable_of(config).with_costs({"F": 1, "B": 2 + recomputed, "I": 1 + recomputed, "W": 1})
    whole = Sizes(config.model_copy(update={"distributed": d.model_copy(update={"tp_size": 1})}))
    num_tables = 1 if m.tie_word_embeddings else 2
    num_parameters = m.num_hidden_layers * whole.layer_parameters + num_tables * whole.table + m.hidden_size
    ranks = [plan_rank(config, rank) for rank in range(d.pp_size)]
    imbalance = max(work) * d.pp_size / sum(work)
    return {
        "grid": {"tp": d.tp_size, "pp": d.pp_size, "dp": d.dp_size, "ranks": d.tp_size * d.pp_size * d.dp_size},
        "parameters": num_parameters,
        "stages": explain_stages(config),
        "step_in_forwards": timetable.step_time / d.pp_chunks,
        "bubble": timetable.bubble,
        # With as many ranks and tokens, step times are to each other as this is.
        "relative_time": (3 + recomputed) * imbalance / (1 - timetable.bubble),
        "sequences": config.global_batch_size,
        "tokens": config.tokens_per_step,
        "flops": flops_per_token(m, num_parameters, t.seq_length) * config.tokens_per_step,
        "ranks": ranks,
        "largest": max(rank["total"] for rank in ranks),
    }


def plan_rank(config, rank):
    d, m, sizes, timetable = config.distributed, config.model, Sizes(config), timetable_of(config)
    layers, last = layers_of_stages(config), timetable.num_stages - 1
    has_copy = m.tie_word_embeddings and timetable.rank_of[0] != timetable.rank_of[last]
    stages = {
        s: Stage(sizes, layers[s], s == 0, s == last, has_copy or not m.tie_word_embeddings, d.sequence_parallel)
        for s in timetable.stages[rank]
    }
    actions, num_sends = actions_and_sends(timetable)[rank]
    held, boundary = rank_memory(actions, list(stages.values()), sizes.boundary)
    parameters, shards = sum(stage.parameters for stage in stages.values()), d.dp_size if d.zero1 else 1
    memory = {
        "weights": parameters * sizes.element,
        "gradients": parameters * sizes.wide,
        "optimizer": parameters * (2 * sizes.wide + sizes.converted) // shards,  # moments, and masters of bfloat16
        **held._asdict(),
        "boundary": boundary,
    }
    # Of N bytes a rank of n sends N · (n - 1)/n in an all-gather or a reduce-scatter, and twice that in an all-reduce.
    tp, dp = 1 - 1 / d.tp_size, 1 - 1 / d.dp_size
    gathered = sum(stage.gathers * sizes.stream + stage.is_last * sizes.loss_sums for stage in stages.values())
    replicated = d.sequence_parallel * sum(stage.replicated for stage in stages.values())  # summed over tp
    copied = has_copy * ((0 in stages) + (last in stages)) * sizes.table
    sent = {
        "tp": tp * (config.training.gradient_accumulation_steps * gathered + 2 * replicated * sizes.wide // shards),
        "pp": num_sends * sizes.boundary + copied * sizes.wide // shards,
        "dp": dp * parameters * (sizes.wide + sizes.element if d.zero1 else 2 * sizes.wide),
    }
    return {
        "pp_rank": rank,
        "stages": {s: name_stage(layers[s], s == 0, s == last) for s in stages},
        "parameters": parameters,
        "memory": memory,
        "total": sum(memory.values()),
        "sent": {axis: round(size) for axis, size in sent.items()},
    }


def name_stage(layers, is_first, is_last):
    numbers = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0]) if layers else ""
    return " ".join(filter(None, ("embedding" * is_first, numbers, "head" * is_last))) or "nothing"


# --- layouts that fit -------------------------------------------------------------------------------------------------


def neighbours(config, memory):
    """Plans of layouts one or two changes away that fit in `memory`, best first: as many ranks, the same batch."""
    d = config.distributed
    grids = [
        {larger: 2 * getattr(d, larger), smaller: getattr(d, smaller) // 2}
        for larger, smaller in permutations(("tp_size", "pp_size", "dp_size"), 2)
        if getattr(d, smaller) % 2 == 0
    ]
    choices = (
        [{}, *grids],
        [{}, *({"pp_engine": name} for name in SCHEDULES if name != d.pp_engine)],
        [{}, {"zero1": not d.zero1}],
        [{}, {"sequence_parallel": not d.sequence_parallel}],
        [{}, {"recompute": "layer" if config.model.recompute == "none" else "none"}],
    )
    fitting = []
    for choice in product(*choices):
        keys = {key: value for change in choice for key, value in change.items()}
        if 1 <= sum(map(bool, choice)) <= 2 and (other := changed(config, **keys)):
            plan = {"changes": differences(config, other), **make_plan(other)}
            if plan["largest"] <= memory:
                fitting.append((keys.items(), plan))
    fitting.sort(key=lambda pair: (pair[1]["relative_time"], len(pair[0]), pair[1]["largest"]))
    # without those that do as well with a change less
    return [plan for i, (keys, plan) in enumerate(fitting) if not any(fewer < keys for fewer, _ in fitting[:i])]


def differences(config, other):
    """The keys to set for `other`, one of the layouts that `changed` makes."""
    changes = {}
    for section in ("distributed", "model", "training"):
        for key, value in getattr(other, section):
            if value != getattr(getattr(config, section), key):
                changes[f"{section}.{key}"] = "balanced" if key == "pp_layers" else value
    return changes


def changed(config, recompute=None, **keys):
    """`config`, settled, with other keys of `distributed` and `model`; None if it cannot run."""
    d, m, t = config.distributed.model_copy(update=keys), config.model.model_copy(), config.training.model_copy()
    m.recompute = recompute or m.recompute
    t.gradient_accumulation_steps, rest = divmod(t.gradient_accumulation_steps * config.distributed.dp_size, d.dp_size)
    most_chunks = (m.num_hidden_layers + 2) // d.pp_size  # embedding and head may be stages of their own
    d.pp_chunks = chunks_of(find_schedule(d.pp_engine)) or max(2, min(d.pp_chunks, most_chunks))
    d.pp_layers = d.pp_layers and "balanced"
    other = config.model_copy(update={"distributed": d, "model": m, "training": t})
    try:
        settle_stages(other)
    except ValueError:
        return None
    return None if rest or any(unmet(other, set())) else other


# --- as text ----------------------------------------------------------------------------------------------------------


def dry_run(config, memory=None, as_json=False):
    """What `--dry-run` prints. memory: such as "80GB"; what does not fit gets neighbours that do."""
    limit = read_size(memory) if memory else None
    plan = make_plan(config)
    if limit:
        plan["memory"], plan["fits"] = limit, plan["largest"] <= limit
        plan["neighbours"] = [] if plan["fits"] else neighbours(config, limit)
    return json.dumps(plan, indent=1) if as_json else "\n".join(describe(plan, config))


def read_size(text):
    """Bytes of a size such as 80GB or 74.5GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text)
    if not match or not float(match[1]):
        raise ValueError(f"--memory {text}: must be a size such as 80GB (80 · 10^9 bytes) or 74.5GiB")
    return round(float(match[1]) * {"GB": 10**9, "GiB": GIB}[match[2]])


def describe(plan, config):
    """The plan as lines of text; sizes in GiB."""
    d, t, ranks = config.distributed, config.training, plan["ranks"]
    grid = "tp {tp} × pp {pp} × dp {dp} = {ranks:,} ranks".format(**plan["grid"])
    yield f"grid: {grid} on {'CPUs' if d.device == 'cpu' else 'GPUs'}, {config.model.dtype}"
    yield f"step: {plan['sequences']:,} sequences = {plan['tokens']:,} tokens, {plan['flops']:.3g} FLOPs"
    yield (
        f"schedule: {d.pp_engine}, {d.pp_chunks} stage{'s' * (d.pp_chunks > 1)} a rank, "
        f"{t.gradient_accumulation_steps} micro-batches of {t.micro_batch_size} × {t.seq_length:,} tokens"
    )
    yield f"  a step takes {plan['step_in_forwards']:.2f} forwards of a rank's layers, bubble {plan['bubble']:.1%}"
    yield plan["stages"]
    yield f"model: {plan['parameters']:,} parameters"
    for rank in ranks:
        yield f"pp rank {rank['pp_rank']:2}  {rank['parameters']:15,}  {' | '.join(rank['stages'].values())}"
    digits = 2 if plan["largest"] > GIB else 4
    held, sent = [*ranks[0]["memory"], "total"], [*ranks[0]["sent"]]
    yield f"GiB{'':7}" + "".join(f"  {name}" for name in held) + " |" + "".join(f"  {axis} sent" for axis in sent)
    for rank in ranks:
        sizes = {**rank["memory"], "total": rank["total"]}
        yield f"pp rank {rank['pp_rank']:2}" + "".join(
            [f"{sizes[name] / GIB:{len(name) + 2}.{digits}f}" for name in held]
            + [" |"]
            + [f"{rank['sent'][axis] / GIB:9.{digits}f}" for axis in sent]
        )
    yield from describe_fit(plan)


def describe_fit(plan):
    need, limit = f"{plan['largest'] / GIB:.3f} GiB of tensors", f"{plan.get('memory', 0) / GIB:.2f} GiB (--memory)"
    if "memory" not in plan:
        yield f"largest: {need}"
    elif plan["fits"]:
        yield f"{need} fit in {limit}"
    elif not plan["neighbours"]:
        yield f"{need} do not fit in {limit}; nor does any layout that is one or two changes away"
    else:
        yield f"{need} do not fit in {limit}; these do, best first (time: a step's FLOPs and bubble, here 1):"
    for other in plan.get("neighbours", [])[:8]:
        changes = " ".join(f"{key.split('.')[1]}={str(value).lower()}" for key, value in other["changes"].items())
        time = other["relative_time"] / plan["relative_time"]
        yield f"  {other['largest'] / GIB:6.2f} GiB  bubble {other['bubble']:5.1%}  time {time:4.2f}  {changes}"
