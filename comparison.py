"""Where a layout's gradients are not those of one process, and what that looks like. See `verify.py`.

A difference that looks like a known kind of fault is named: a factor that is one of the layout's sizes, a sum that is
missing, micro-batches that count twice or not at all.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

import torch

import process_group_manager as pgm
from tensor_parallel import Shard

# How far apart two right answers are: plain PyTorch sums in another order than our layers, tp and dp in yet another.
# Measured with 4 and 32 layers: 1e-15 and 1e-13, 2e-7 and 2e-6, 6e-3 and 4e-2. So bfloat16, which rounds tp's partial
# sums to 8 bits, shows wrong factors and missing sums, no small mistakes.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}
EPSILON = {"float64": 2e-16, "float32": 1e-7, "bfloat16": 1e-7}  # of what gradients are added up in
SCALARS = ("loss", "gradient norm")  # compared like parameters with one element, but to a hundredth of the tolerance
UNEQUAL = {  # what it means that ranks along an axis of the grid have different gradients of the same thing
    "dp": "the sum over dp is missing, or not complete",
    "pp": "copies of the tied embedding need the sum of both gradients, over the embedding group",
    "tp": "a sum over tp is missing in backward: f, or that of a parameter to be marked partial_over_tp",
}


class Held(NamedTuple):
    """What a rank has of a parameter."""

    place: Shard  # of this rank's part in the whole
    weights: torch.Tensor
    gradients: torch.Tensor


class Reference(NamedTuple):
    """What one process computes, by name of the parameter."""

    weights: dict
    gradients: dict  # SCALARS, too
    uses: dict  # {"lookup" or "head": the tied embedding's gradient from this one of its two uses}
    by_microbatch: dict  # of parameters that are vectors: [the gradient from micro-batch i]


class Row(NamedTuple):
    """One comparison: a from the layout, b from one process."""

    name: str
    stage: int
    error: float  # max|a − b| / max|b|
    factor: float  # the k that brings k · b closest to a
    is_multiple: bool  # a is k · b, and k is not 1
    is_right: bool


def kind(name):
    """decoder_layers.3.mlp.up_proj.weight -> mlp.up_proj.weight"""
    return re.sub(r"^decoder_layers\.\d+\.", "", name)


def listing(things):
    things = list(things)
    return ", ".join(things[:3]) + (f" and {len(things) - 3} more" if len(things) > 3 else "")


def numbered(word, numbers):
    """stage, [1, 2, 3] -> stages 1–3"""
    numbers = sorted(numbers)
    ending = "" if len(numbers) == 1 else "es" if word.endswith("ch") else "s"
    is_run = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{word}{ending} " + (f"{numbers[0]}–{numbers[-1]}" if is_run else ", ".join(map(str, numbers)))


class Comparison:
    """Takes each parameter from all ranks, then says what differs and what that looks like."""

    def __init__(self, config, layers, expected):
        self.distributed, self.num_microbatches = config.distributed, config.training.gradient_accumulation_steps
        self.expected, self.dtype, self.tolerance = expected, config.model.dtype, TOLERANCE[config.model.dtype]
        self.stage_of = {f"decoder_layers.{i}": stage for stage, numbers in enumerate(layers) for i in numbers}
        self.stage_of |= {"embedding": 0, "final_norm": len(layers) - 1, "final_proj": len(layers) - 1}
        self.largest = max(b.abs().max().item() for name, b in expected.gradients.items() if name not in SCALARS)
        self.gathered, self.scalars, self.rows = {}, [], []
        self.odd_weights = {}  # parameters that do not even start as in one process -> the ranks
        self.unequal = defaultdict(lambda: ({}, {}))  # axis -> parameters, pairs of ranks with different gradients

    def add(self, name, of_rank):
        """of_rank: {rank: Held} of parameter `name`."""
        b, weights = self.expected.gradients[name].double().cpu(), self.expected.weights.get(name)
        a = self.gathered[name] = torch.full_like(b, math.nan)
        for rank, held in reversed(of_rank.items()):  # where ranks differ, it is the first one's that is compared
            held.place.take(a).copy_(held.gradients)
            if weights is not None and not torch.equal(held.weights, held.place.take(weights).cpu()):
                self.odd_weights.setdefault(name, set()).add(rank)
        self._compare_ranks(name, of_rank)
        rows, tolerance = (self.scalars, self.tolerance / 100) if name in SCALARS else (self.rows, self.tolerance)
        # Rounding is as large as the gradients around it. So a gradient that is nothing beside the largest one, as that
        # of q and k is where a sequence has one token, is not held against its own size.
        least = 16 * EPSILON[self.dtype] / self.tolerance * self.largest
        scale, factor = max(b.abs().max().item(), least) or 1.0, ((a * b).sum() / b.square().sum()).item()
        error, rest = (a - b).abs().max().item() / scale, (a - factor * b).abs().max().item() / scale
        stage = self.stage_of.get(re.match(r"decoder_layers\.\d+|\w+", name)[0])
        is_multiple = rest <= tolerance * max(1.0, abs(factor)) and abs(factor - 1) > 0.01
        rows.append(Row(name, stage, error, factor, is_multiple, error <= tolerance))

    def _compare_ranks(self, name, of_rank):
        """Bit for bit, along each axis of the grid: the ranks that hold the same part."""
        grid = pgm.rank_grid(self.distributed.tp_size, self.distributed.pp_size, self.distributed.dp_size)
        for dimension, axis in enumerate(("dp", "pp", "tp")):
            for line in grid.movedim(dimension, -1).flatten(0, 1).tolist():
                first_with = {}
                for rank in filter(of_rank.get, line):
                    first = first_with.setdefault(of_rank[rank].place, rank)
                    pair = (of_rank[r].gradients.contiguous().view(torch.uint8) for r in (first, rank))
                    if not torch.equal(*pair):
                        names, ranks = self.unequal[axis]
                        names[name] = ranks[f"rank {rank} ≠ rank {first}"] = True

    def report(self):
        """Prints table and findings. Returns the exit code."""
        for row in self.scalars:
            ours, theirs = self.gathered[row.name].item(), self.expected.gradients[row.name].item()
            print(f"{row.name}: {ours:.12g}, in one process {theirs:.12g}, relative error {row.error:.1e}")
        print(f"{len(self.rows)} gradients compared; in {self.dtype} errors up to {self.tolerance:.0e} are rounding")
        print(f"{'the worst':50}  stage  rel. error    factor  verdict")
        worst = sorted(self.rows, key=lambda row: -math.inf if math.isnan(row.error) else -row.error)
        for row in worst[:8]:
            verdict = "ok" if row.is_right else "a multiple" if row.is_multiple else "differs"
            print(f"{row.name:50}  {row.stage:5}  {row.error:10.1e}  {row.factor:8.4f}  {verdict}")
        findings = list(self.findings())
        print(*(f"- {finding}" for finding in findings), "WRONG" if findings else "OK", sep="\n", flush=True)
        return int(bool(findings))

    def findings(self):
        """What is wrong, and what it looks like, in sentences."""
        loss, norm = self.scalars
        broken = [row for row in self.rows if not math.isfinite(row.error)]
        wrong = [row for row in self.rows if not row.is_right and row not in broken]
        if self.odd_weights:
            ranks = numbered("rank", set().union(*self.odd_weights.values()))
            yield f"other initial weights than in one process, on {ranks}: {listing(self.odd_weights)}"
        for axis, (names, ranks) in self.unequal.items():
            gradients = [name for name in names if name not in SCALARS]
            meaning = f": {UNEQUAL[axis]}" if gradients else ""
            yield f"{axis} ranks differ in {listing(gradients or names)} ({listing(ranks)}){meaning}"
        if broken:
            yield f"NaN, infinity, or a part that no rank holds: {self._these(broken)}"
        if not loss.is_right:
            is_known = self._causes(loss.factor)
            yield f"the loss is {self._times(loss.factor) if is_known else 'wrong: look at the forward pass first'}"
        elif wrong or broken:
            yield "the loss is right: look at the backward pass first, and at sums of gradients over ranks"
        elif not norm.is_right:
            yield "every gradient is right, their norm is not: shards and stages add up, replicas and copies count once"
        by_factor, others = defaultdict(list), [row for row in wrong if not row.is_multiple]
        for row in wrong:
            by_factor[self._times(row.factor) if row.is_multiple else "wrong, by no plain factor"].append(row)
        for words, rows in by_factor.items():
            yield f"{self._these(rows)} {'is' if len(rows) == 1 else 'are'} {words}"
        for use, part in self.expected.uses.items():
            if (self.gathered["embedding.weight"] - part.cpu()).abs().max() <= self.tolerance * part.abs().max():
                yield f"the tied embedding has the gradient of its use as {use} alone: the other use's is missing"
        yield from self._miscounted_microbatches({row.stage for row in others})
        if others and self.dtype != "float64" and max(row.error for row in others) < 100 * self.tolerance:
            yield "a difference this small may be rounding: model.dtype=float64 tells"

    def _these(self, rows):
        """Whose gradients `rows` are, as briefly as it can be said."""
        others = [row for row in self.rows if row not in rows]
        stages, kinds = {row.stage for row in rows}, {kind(row.name) for row in rows}
        if len(rows) == 1:
            return f"the gradient of {rows[0].name}"
        if not others:
            return "all gradients"
        if not stages & {row.stage for row in others}:
            return f"all gradients of {numbered('stage', stages)}"
        if not kinds & {kind(row.name) for row in others} and len(kinds) <= 3:
            return f"all gradients of {listing(sorted(kinds))}"
        if len(others) <= 3:
            return f"all gradients but {listing(row.name for row in others)}"
        return f"the gradients of {listing(row.name for row in rows)}"

    def _causes(self, factor):
        """The sizes that `factor` is, or one part in."""
        sizes = self.num_microbatches, self.distributed.dp_size, self.distributed.tp_size
        names = "the number of micro-batches", "dp_size", "tp_size"
        ratio = max(factor, 1 / factor) if factor > 0 else 0
        return [name for name, size in zip(names, sizes, strict=True) if size > 1 and abs(ratio / size - 1) < 0.01]

    def _times(self, factor):
        """4.0 -> "4.00× too large: the number of micro-batches"."""
        causes = self._causes(factor)
        if not causes and abs(factor) <= self.tolerance:
            return "0: they never arrive"
        if factor < 0:
            return f"of the wrong sign, {factor:.2f}×"
        size = f"{factor:.2f}× too large" if factor > 1 else f"{1 / factor:.2f}× too small"
        return f"{size}: {' or '.join(causes)}" if causes else size

    def _miscounted_microbatches(self, stages):
        """Least squares over a stage's vectors: how often does each micro-batch count in its gradients?"""
        found, by_microbatch = defaultdict(list), self.expected.by_microbatch
        vectors = [row for row in self.rows if row.name in by_microbatch and math.isfinite(row.error)]
        for stage in sorted(stages & {row.stage for row in vectors}):
            names = [row.name for row in vectors if row.stage == stage]
            parts = torch.cat([torch.stack(by_microbatch[name], dim=1) for name in names])  # [elements, micro-batches]
            ours = torch.cat([self.gathered[name] for name in names])
            counts = torch.linalg.lstsq(parts, ours[:, None], driver="gelsd").solution[:, 0]
            fits = (parts @ counts - ours).norm() <= self.tolerance * ours.norm()
            if fits and len(ours) >= 2 * len(counts):  # with fewer elements anything fits
                found[tuple(round(count, 2) + 0.0 for count in counts.tolist())].append(stage)
        for counts, stages in found.items():
            for dp_rank in range(self.distributed.dp_size):
                mine = counts[dp_rank :: self.distributed.dp_size]  # as data.py deals micro-batches out
                for count in sorted(set(mine) - {1.0}):
                    which = numbered("micro-batch", [i for i, other in enumerate(mine) if other == count])
                    times = f"added {count:g} times" if count else "missing"
                    yield f"the gradients of {numbered('stage', stages)}: {which} of dp rank {dp_rank} {times}"
