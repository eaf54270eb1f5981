"""What a step spent its time on: the bubble, measured beside predicted, and a trace to look at.

    … train.py --config configs/tiny_pp2_tp2.json logging.trace_file=trace.json
    python visualize.py trace.json -o timeline.svg             # or open trace.json in https://ui.perfetto.dev

`pipeline_parallel.PipelineExecutor` records a Span per action and per wait; here they are added up over the ranks.
"""

import json
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from schedules import Action
from timetable import timetable_of_run


class Span(NamedTuple):
    """What a rank did from `start` to `end` (marks of its clock): an action, or waiting for another rank."""

    kind: str  # F, B, I, W, "wait" for an action's input, or "post": transfers, and waiting for earlier ones to leave
    chunk: int
    microbatch: int
    start: object
    end: object


KINDS = "FBIW"


def make_clock(device):
    """A function that marks the present: seconds on a CPU; on a GPU an event in its stream, so that nobody waits."""

    def cuda_clock():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return cuda_clock if device.type == "cuda" else time.perf_counter


def seconds(start, end):
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1000


def sum_spans(model, device):
    """[2, 4, stages], the same on every rank: seconds and count of the last step's F, B, I, W of every stage."""
    sums = torch.zeros(2, len(KINDS), model.num_stages, dtype=torch.float64)
    for span in model.spans:
        if span.kind in KINDS:
            of_one = torch.tensor([seconds(span.start, span.end), 1.0], dtype=torch.float64)
            sums[:, KINDS.index(span.kind), model.stages[span.chunk]] += of_one
    sums = sums.to(device)
    dist.all_reduce(sums)
    return sums


def stage_costs(model, device):
    """{kind: [mean seconds on every stage]} of the last step, for `Timetable`."""
    seconds_of, counts = sum_spans(model, device)
    means = (seconds_of / counts).tolist()
    return {kind: of_stages for kind, of_stages, count in zip(KINDS, means, counts, strict=True) if count.all()}


def bubbles(model, num_microbatches, device):
    """(measured, predicted) bubble of the last step: idle time / step time, mean over ranks.

    Predicted is the timetable's bubble when every action takes what its kind took on average in this very step.
    """
    manager = pgm.process_group_manager
    duration = torch.tensor(seconds(model.spans[0].start, model.spans[-1].end), dtype=torch.float64, device=device)
    dist.all_reduce(duration, dist.ReduceOp.MAX)
    sums = sum_spans(model, device).sum(-1)
    busy = sums[0].sum() / manager.world_size
    means = {kind: total / count for kind, (total, count) in zip(KINDS, sums.t().tolist(), strict=True) if count}
    predicted = predicted_bubble(model.pp_engine, manager.pp_size, num_microbatches, model.num_chunks, means)
    return 1 - (busy / duration).item(), predicted


def predicted_bubble(pp_engine, pp_size, num_microbatches, num_chunks, mean_seconds, transfer=0):
    """The bubble when every F, B, I, W of a chunk takes its `mean_seconds` (by kind; those that the schedule uses)."""
    timetable = timetable_of_run(pp_engine, pp_size, num_microbatches, num_chunks)
    return timetable.with_costs(mean_seconds, transfer).bubble


def write_trace(path, model, num_microbatches, zero):
    """Chrome trace of the last step: a process per pipeline rank of dp rank 0 and tp rank 0, microseconds from `zero`.

    `zero` is this rank's mark right after a barrier, which puts the ranks on one clock.
    """
    manager = pgm.process_group_manager
    events = [
        {
            "name": str(Action(span.kind, span.chunk, span.microbatch)),
            "cat": span.kind,
            "ph": "X",
            "ts": 1e6 * seconds(zero, span.start),
            "dur": 1e6 * seconds(span.start, span.end),
            "pid": manager.pp_rank,
            "tid": 0,
            "args": {"stage": model.stages[span.chunk], "chunk": span.chunk, "microbatch": span.microbatch},
        }
        for span in model.spans
    ]
    of_all_ranks = [None] * manager.world_size
    dist.all_gather_object(of_all_ranks, events if manager.dp_rank == manager.tp_rank == 0 else [])
    if manager.global_rank == 0:
        metadata = {
            "pp_engine": model.pp_engine,
            "pp_size": manager.pp_size,
            "num_chunks": model.num_chunks,
            "num_microbatches": num_microbatches,
            "tp_size": manager.tp_size,
            "dp_size": manager.dp_size,
        }
        with open(path, "w") as file:
            json.dump({"traceEvents": sum(of_all_ranks, []), "metadata": metadata}, file)
