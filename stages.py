"""Which layers each stage has, and why: as even as possible, as given, or so that no rank is slower than it need be.

python train.py --config configs/llama_1b_pp4_tp2.json --dry-run distributed.pp_layers=balanced
"""

from itertools import groupby

from find_schedule import chunks_of, find_schedule
from pipeline_parallel import distribute_layers
from stage_memory import Sizes
from timetable import timetable_of_run


def balance_layers(num_layers, num_stages, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0, rank_of_stage=None):
    """Layers of each stage that make the slowest rank as fast as any split does; on each rank, the slowest stage.

    Ranks count, not stages: in the steady phase a rank works without a pause, and takes the sum of its chunks. One
    chunk a rank, unless `rank_of_stage` says otherwise.
    """
    rank_of_stage = rank_of_stage or list(range(num_stages))
    stages_of = {rank: [s for s in range(num_stages) if rank_of_stage[s] == rank] for rank in set(rank_of_stage)}
    counts = [int(0 < stage < num_stages - 1) for stage in range(num_stages)]  # a stage must have something to do
    if sum(counts) > num_layers:
        raise ValueError(
            f'distributed.pp_layers: "balanced" needs a layer for each of the {num_stages} stages (distributed.pp_size '
            f"× pp_chunks) but the first and the last; model.num_hidden_layers is {num_layers}"
        )
    costs = [count * layer_cost for count in counts]
    costs[0] += embedding_cost
    costs[-1] += head_cost
    # Each further layer goes to the rank that has least to do. That is exact: when the slowest rank got its last one,
    # every rank's sum was at least the maximum less one layer; so in a split that stays below the maximum no rank has
    # more layers than then, and one is left over. Ties: the later rank, which holds fewer micro-batches.
    for _ in range(num_layers - sum(counts)):
        rank = min(stages_of, key=lambda rank: (sum(costs[stage] for stage in stages_of[rank]), -rank))
        stage = min(stages_of[rank], key=lambda stage: (costs[stage], -stage))
        counts[stage] += 1
        costs[stage] += layer_cost
    return counts


def head_cost(config):
    """Time of the output matrix in units of a layer's, by FLOPs as `flops_per_token` counts them. (Embedding: 0.)"""
    m, sizes = config.model, Sizes(config)
    layer = sizes.matrices * config.distributed.tp_size
    layer += 2 * m.num_attention_heads * m.head_dim * config.training.seq_length
    # A forward and, twice as long, its backward; recomputation is one more forward.
    return m.hidden_size * m.vocab_size * (3 + sizes.recomputes_logits) / (layer * (3 + sizes.recomputed_share))


def settle_stages(config):
    """Fills in pp_chunks where it is null and pp_layers where it is "balanced". ValueError for what cannot run."""
    d, num_layers = config.distributed, config.model.num_hidden_layers
    if d.pp_chunks is None:
        d.pp_chunks = chunks_of(find_schedule(d.pp_engine)) or 2
    rank_of = timetable_of(config).rank_of
    ends = {rank_of[0], rank_of[len(rank_of) - 1]}
    if config.model.tie_word_embeddings and len(ends) == 2 and ends != {0, d.pp_size - 1}:
        raise ValueError(
            f"model.tie_word_embeddings: true, but distributed.pp_engine {d.pp_engine!r} places the first and the last "
            f"stage on pp ranks {' and '.join(map(str, sorted(ends)))}: must be 0 and {d.pp_size - 1}, or the same one"
        )
    if d.pp_layers == "balanced":
        ranks = [rank_of[stage] for stage in range(len(rank_of))]
        d.pp_layers = balance_layers(num_layers, len(ranks), head_cost=head_cost(config), rank_of_stage=ranks)
    layers_of_stages(config)


def layers_of_stages(config):
    d = config.distributed
    return distribute_layers(config.model.num_hidden_layers, d.pp_size * d.pp_chunks, d.pp_layers)


def work_of_ranks(config):
    """What each pp rank has to do for a micro-batch, in layers."""
    work = [len(layers) for layers in layers_of_stages(config)]
    work[-1] += head_cost(config)
    return [sum(work[stage] for stage in stages) for stages in timetable_of(config).stages]


def explain_stages(config):
    """Why the stages are as they are, in a line; 1 × 126 is a run of 126 stages with one layer."""
    work, counts = work_of_ranks(config), [len(layers) for layers in layers_of_stages(config)]
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    stages = " ".join(
        f"{count} × {length}" if length > 4 else " ".join([str(count)] * length) for count, length in runs
    )
    slowest = f"slowest rank {max(work):.2f} layers, mean {sum(work) / len(work):.2f}"
    return f"head costs {head_cost(config):.2f} layers, embedding 0: stages {stages}; {slowest}"


def timetable_of(config):
    """The timetable that the run takes its program from."""
    d = config.distributed
    return timetable_of_run(d.pp_engine, d.pp_size, config.training.gradient_accumulation_steps, d.pp_chunks)
