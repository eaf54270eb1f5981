"""Pipeline parallelism: each pp rank holds some of the layers and runs its list of a schedule.

    schedules.py   what every rank does, in order
    timetable.py   the same list with the transfers in it: `rank_program`
    here           `PipelineParallel`, the stages of this rank, and `PipelineExecutor`, which runs a program for a step

Contract at a boundary: one tensor (micro_batch_size, seq_length, hidden_size) in the model's dtype crosses it, forward
as activations and backward as their gradient; with sequence parallelism seq_length is divided by tp_size. Everything
else that a stage needs (tokens or targets) it reads from its own data loader, which gives every rank
the same micro-batch i. So no shape, flag or None ever travels.
"""

import time
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import process_group_manager as pgm
from find_schedule import find_schedule, placement_of
from linear import deferred_weight_gradients
from model import head_loss, recompute, rotary_tables
from schedules import Action
from timeline import Span
from timetable import rank_program

SENDS_IN_FLIGHT = 4  # batches: enough to overlap, and few enough that outputs are freed, not collected


def distribute_layers(num_layers, num_stages, layers_per_stage=None):
    """The layer numbers of every stage, as ranges: even, the first stages one more, or by explicit counts.

    distribute_layers(5, 2) -> [range(0, 3), range(3, 5)]. Raises ValueError when the counts do not add up, or when a
    stage between the first and the last would have nothing to do.
    """
    if layers_per_stage is None:
        small, larger = divmod(num_layers, num_stages)
        layers_per_stage = [small + (stage < larger) for stage in range(num_stages)]
    if len(layers_per_stage) != num_stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 0:
        raise ValueError(
            f"distributed.pp_layers: {list(layers_per_stage)} must be {num_stages} layer counts (one a stage) "
            f"that sum to {num_layers} (model.num_hidden_layers)"
        )
    if 0 in layers_per_stage[1:-1]:
        raise ValueError(
            f"distributed.pp_size × pp_chunks = {num_stages} stages, {layers_per_stage} layers in them: all but the "
            f"first and the last stage need one, of the {num_layers} of model.num_hidden_layers"
        )
    starts = [sum(layers_per_stage[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, layers_per_stage, strict=True)]


class PipelineParallel(nn.Module):
    """The stages of this pp rank, one per model chunk, with the parameter names of the whole model.

    Takes a meta-device `Llama` and keeps what its stages need; whether a stage is first or last is asked of the stage,
    never of the rank (in a V, rank 0 holds both ends). With `recompute_every` k, every k-th layer keeps only its input
    and runs forward once more in backward (arXiv 1604.06174).
    """

    def __init__(self, model, pp_engine="1f1b", num_chunks=1, pp_layers=None, recompute_every=0):
        super().__init__()
        manager = pgm.process_group_manager
        self.config, self.pp_engine, self.num_chunks = model.config, pp_engine, num_chunks
        self.num_stages = manager.pp_size * num_chunks
        placement = placement_of(find_schedule(pp_engine))
        self.stages = [placement(manager.pp_rank, chunk, manager.pp_size) for chunk in range(num_chunks)]
        self.rank_of_stage = {
            placement(pp_rank, chunk, manager.pp_size): pp_rank
            for pp_rank in range(manager.pp_size)
            for chunk in range(num_chunks)
        }
        self.layers = distribute_layers(model.config.num_hidden_layers, self.num_stages, pp_layers)  # of every stage
        mine = sorted(i for stage in self.stages for i in self.layers[stage])
        self.embedding = model.embedding if 0 in self.stages else None
        self.decoder_layers = nn.ModuleDict({str(i): model.decoder_layers[str(i)] for i in mine})
        has_last = self.num_stages - 1 in self.stages
        self.final_norm = model.final_norm if has_last else None
        self.final_proj = model.final_proj if has_last else None
        if self.config.tie_word_embeddings and self.rank_of_stage[0] != self.rank_of_stage[self.num_stages - 1]:
            # Both ends of the pipeline hold the tied matrix: data_parallel sums the two gradients.
            for end in filter(None, (self.embedding, self.final_proj)):
                end.weight.has_copy, end.weight.is_copy = True, end is self.final_proj
        self.loss_function = model.loss_function
        self.recompute_every, self.show_transfers = recompute_every, False
        self.clock, self.spans = time.perf_counter, []  # what the last step spent its time on, see timeline.py
        self._rotary = None

    def is_first(self, chunk):
        return self.stages[chunk] == 0

    def is_last(self, chunk):
        return self.stages[chunk] == self.num_stages - 1

    def forward(self, x, chunk=0, targets=None):
        """tokens [b, s] or hidden states [b, s, h] -> hidden states [b, s, h]; on the last stage the loss of `targets`.

        Without `targets` the last stage gives logits [b, s, v], or this tp rank's share of them.
        """
        if self._rotary is None or self._rotary[0].device != x.device:
            self._rotary = rotary_tables(self.config, x.device)
        if self.is_first(chunk):
            x = self.embedding(x)
        for i in self.layers[self.stages[chunk]]:
            layer = self.decoder_layers[str(i)]
            if self.recompute_every and i % self.recompute_every == 0 and torch.is_grad_enabled():
                layer = partial(recompute, layer)
            x = layer(x, *self._rotary)
        if self.is_last(chunk):
            x = self.final_norm(x)  # [b, s, h]: sequence parallelism gathers what it had split, see tensor_parallel.py
            return self.final_proj(x) if targets is None else head_loss(self, x, targets)
        return x


# --- communication ----------------------------------------------------------------------------------------------------


def pipeline_communicate(operations, group):
    """Posts one batch of transfers without waiting: [(dist.isend or dist.irecv, tensor, global rank of the peer), …].

    Returns one handle per operation. nccl gives one for the whole batch, gloo one each, to be waited for exactly once.
    """
    works = dist.batch_isend_irecv([dist.P2POp(*operation, group=group) for operation in operations])
    return works if len(works) == len(operations) else works * len(operations)


class PipelineExecutor:
    """Runs one rank's program for one step. A dictionary holds each thing between two actions of one micro-batch."""

    def __init__(self, model, data_loader, tensor_shapes, device, dtype, forward_only=False):
        self.model, self.data_loader, self.forward_only = model, data_loader, forward_only
        self.shape, self.device, self.dtype = tuple(tensor_shapes), device, dtype
        self.num_microbatches = data_loader.gradient_accumulation_steps
        self.inbox = {}  # (is_backward, stage it is for, micro-batch) -> (tensor, handle or None)
        self.outbox = {}  # (is_backward, stage it is for, micro-batch) -> tensor
        self.graphs = {}  # (chunk, micro-batch) -> (input, edge of the graph that ends in the output or the loss)
        self.weight_gradients = {}  # (chunk, micro-batch) -> the closures that I left over for W
        self.losses = [None] * self.num_microbatches
        self.sends_in_flight = []  # one list of (handle, tensor) per batch, the oldest first
        self.spans, self.now = [], model.clock()

    def run(self, program):
        """Returns the mean loss of this pipeline's micro-batches: the last stage's value, on every other rank 0."""
        compute = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weight}
        with torch.no_grad() if self.forward_only else nullcontext():
            for step in program:
                if isinstance(step, Action):
                    compute[step.kind](*step)
                    self._record(*step)
                else:
                    self.communicate(step)
                    self._record("post", *step[0].action[1:])
        self._wait_for_sends(0)
        assert not (self.inbox or self.outbox or self.graphs or self.weight_gradients), "the program left work undone"
        if None in self.losses:
            return torch.zeros((), device=self.device, dtype=torch.promote_types(self.dtype, torch.float32))
        return torch.stack(self.losses).sum()

    def forward(self, kind, chunk, microbatch):
        stage, is_first, is_last = self.model.stages[chunk], self.model.is_first(chunk), self.model.is_last(chunk)
        batch = self.data_loader[microbatch] if is_first or is_last else {}
        if is_first:
            x = batch["input_ids"]
        else:  # its .grad is what goes to the stage before
            x = self._take((False, stage, microbatch), chunk).requires_grad_(not self.forward_only)
        output = self.model(x, chunk, batch.get("target_ids"))
        if is_last:
            # Here and nowhere else the loss is scaled: gradients of micro-batches add up to that of their mean.
            output = output / self.num_microbatches
            self.losses[microbatch] = output.detach()
        else:
            self._put((False, stage + 1, microbatch), output.detach())
        if not self.forward_only:
            self.graphs[chunk, microbatch] = x, torch.autograd.graph.get_gradient_edge(output)

    def backward(self, kind, chunk, microbatch):
        """B, or I: the same backward, whose weight gradients are put aside for W."""
        stage = self.model.stages[chunk]
        gradient = None if self.model.is_last(chunk) else self._take((True, stage, microbatch), chunk)
        x, edge = self.graphs.pop((chunk, microbatch))
        with deferred_weight_gradients() if kind == "I" else nullcontext() as closures:
            torch.autograd.backward(edge, gradient)
        if kind == "I":
            self.weight_gradients[chunk, microbatch] = closures
        if not self.model.is_first(chunk):
            self._put((True, stage - 1, microbatch), x.grad)

    def weight(self, kind, chunk, microbatch):
        for compute_gradient in self.weight_gradients.pop((chunk, microbatch)):
            compute_gradient()

    def _put(self, key, tensor):
        """Hands a result on: into the inbox if this rank holds the next stage, else to wait for its transfer."""
        if self.model.rank_of_stage[key[1]] == pgm.process_group_manager.pp_rank:
            self.inbox[key] = tensor, None
        else:
            self.outbox[key] = tensor

    def _take(self, key, chunk):
        tensor, handle = self.inbox.pop(key)
        if handle is not None:
            self._show(f"stage {key[1]} waits for the {'gradient' if key[0] else 'input'} of micro-batch {key[2]}")
            handle.wait()
            self._record("wait", chunk, key[-1])
        return tensor

    def _record(self, kind, chunk, microbatch):
        start, self.now = self.now, self.model.clock()
        self.spans.append(Span(kind, chunk, microbatch, start, self.now))

    def _show(self, what):
        if self.model.show_transfers:
            line = f"step {self.data_loader.step + 1}, rank {pgm.process_group_manager.global_rank}: {what}\n"
            print(line, end="", flush=True)  # in one piece: lines of several ranks do not mix

    def communicate(self, transfers):
        """Posts the transfers of one tick: this rank's sends from the outbox, its receives into new inbox tensors."""
        manager, operations, arriving, leaving = pgm.process_group_manager, [], [], []
        for transfer in transfers:
            key = (transfer.action.kind != "F", transfer.target_stage, transfer.action.microbatch)
            source, target = manager.pp_ranks[transfer.source_rank], manager.pp_ranks[transfer.target_rank]
            if transfer.source_rank == manager.pp_rank:
                tensor = self.outbox.pop(key)
                self._check_boundary(tensor, transfer)
                operations.append((dist.isend, tensor, target))
                stages = f"stage {transfer.source_stage} → {transfer.target_stage}"
                self._show(f"sends {transfer.action} to rank {target} ({stages}, tick {transfer.tick})")
            else:
                tensor = torch.empty(self.shape, device=self.device, dtype=self.dtype)
                operations.append((dist.irecv, tensor, source))
                arriving.append((key, tensor))
        handles = pipeline_communicate(operations, manager.pp_group)
        for (operation, tensor, _), handle in zip(operations, handles, strict=True):
            if operation is dist.isend:
                leaving.append((handle, tensor))
            else:
                key, tensor = arriving.pop(0)
                self.inbox[key] = tensor, handle
        self.sends_in_flight.append(leaving)
        self._wait_for_sends(SENDS_IN_FLIGHT)

    def _wait_for_sends(self, batches_left):
        while len(self.sends_in_flight) > batches_left:
            for handle, _ in self.sends_in_flight.pop(0):
                handle.wait()

    def _check_boundary(self, tensor, transfer):
        """gloo delivers a tensor of another shape or dtype than expected as garbage: so the sender looks first."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype or not tensor.is_contiguous():
            raise RuntimeError(
                f"stage {transfer.source_stage} would send {transfer.action} as {tuple(tensor.shape)} {tensor.dtype}"
                f"{'' if tensor.is_contiguous() else ', not contiguous'}; stage {transfer.target_stage} expects "
                f"{self.shape} {self.dtype}"
            )


# --- one step ---------------------------------------------------------------------------------------------------------


def run_pipeline(model, data_loader, tensor_shapes, device, dtype, pp_engine, forward_only=False):
    """One step of `pp_engine`, or its forwards alone. Leaves gradients, returns the loss of the global batch.

    The loss is the mean over all micro-batches of all dp ranks, known to every rank.
    """
    manager = pgm.process_group_manager
    num_microbatches = data_loader.gradient_accumulation_steps
    program = rank_program(
        pp_engine, manager.pp_rank, manager.pp_size, num_microbatches, model.num_chunks, forward_only=forward_only
    )
    executor = PipelineExecutor(model, data_loader, tensor_shapes, device, dtype, forward_only)
    loss = executor.run(program)
    if not forward_only:
        model.spans = executor.spans
    dist.all_reduce(loss, group=manager.pp_dp_group)
    return loss / manager.dp_size


def evaluate(model, data_loader, tensor_shapes, device, dtype, num_steps):
    """Mean loss of the first `num_steps` global batches of `data_loader`: the model's own schedule, forward only."""
    total = 0
    for step in range(num_steps):
        data_loader.step = step
        total += run_pipeline(model, data_loader, tensor_shapes, device, dtype, model.pp_engine, forward_only=True)
    return total / num_steps


def train_step_pipeline(model, data_loader, tensor_shapes, device, dtype):
    """One step of the schedule that `model` was placed for."""
    return run_pipeline(model, data_loader, tensor_shapes, device, dtype, model.pp_engine)


def train_step_pipeline_afab(model, data_loader, tensor_shapes, device, dtype):
    return run_pipeline(model, data_loader, tensor_shapes, device, dtype, "afab")


def train_step_pipeline_1f1b(model, data_loader, tensor_shapes, device, dtype):
    return run_pipeline(model, data_loader, tensor_shapes, device, dtype, "1f1b")
