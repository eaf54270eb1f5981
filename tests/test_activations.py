"""What a rank really holds while a schedule runs, against what the timetable predicts."""

import weakref

import pytest
import torch

import process_group_manager as pgm
from find_schedule import chunks_of
from layouts import MICRO_BATCH_SIZE, SEQ_LENGTH, RandomMicroBatches, tiny_config
from model import build_on_meta, materialize
from pipeline_parallel import PipelineExecutor, PipelineParallel
from schedules import SCHEDULES
from tensor_parallel import apply_tensor_parallel
from timetable import make_timetable, rank_program


class Saved:
    """A tensor that autograd keeps for backward, and for which chunk and micro-batch."""

    def __init__(self, tensor, owner):
        self.tensor, self.owner = tensor, owner


class WatchedRun(PipelineExecutor):
    """Counts, after every action, the micro-batches with anything left in memory: saved tensors, or work for W."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.saved, self.peak = weakref.WeakSet(), 0

    def forward(self, kind, chunk, microbatch):
        def pack(tensor):
            saved = Saved(tensor, (chunk, microbatch))
            self.saved.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            super().forward(kind, chunk, microbatch)

    def _record(self, kind, *arguments):
        super()._record(kind, *arguments)
        held = {saved.owner for saved in self.saved} | self.weight_gradients.keys()
        self.peak = max(self.peak, len(held))


def measure_peak(engine, chunks, microbatches):
    """Micro-batches held at once on this rank, in shares of its layers; nothing may be left at the end."""
    manager = pgm.setup_process_group_manager(1, torch.distributed.get_world_size(), 1)
    config = tiny_config(num_hidden_layers=8)
    model = PipelineParallel(apply_tensor_parallel(build_on_meta(config, torch.float32)), engine, chunks)
    materialize(model, config, seed=1, device=torch.device("cpu"))
    data_loader = RandomMicroBatches(config.vocab_size, microbatches)
    shape = (MICRO_BATCH_SIZE, SEQ_LENGTH, config.hidden_size)
    run = WatchedRun(model, data_loader, shape, torch.device("cpu"), torch.float32)
    run.run(rank_program(engine, manager.pp_rank, manager.pp_size, microbatches, chunks))
    assert not run.saved
    return run.peak / chunks


@pytest.mark.parametrize("microbatches", [3, 8])
@pytest.mark.parametrize("engine, chunks", [(name, chunks_of(schedule) or 2) for name, schedule in SCHEDULES.items()])
def test_activations_held_are_those_predicted(pool, engine, chunks, microbatches):
    predicted = make_timetable(engine, 4, microbatches, chunks).peak_microbatches
    assert pool.run(4, measure_peak, engine, chunks, microbatches) == predicted


def test_afab_holds_more_with_more_micro_batches_and_1f1b_does_not(pool):
    afab, one_f_one_b = ([pool.run(2, measure_peak, e, 1, m)[0] for m in (4, 8, 16)] for e in ("afab", "1f1b"))
    assert afab == [4, 8, 16] and one_f_one_b == [2, 2, 2]
