"""What a rank has to hold: bytes that a micro-batch leaves behind in a layer and in a stage, and the most over a step.

`Sizes` follows model.py and tensor_parallel.py tensor by tensor, `Stage` adds up its layers, `rank_memory` plays the
very program that a rank will run and finds the moment that needs most. For tp_rank 0, which has the largest share of
the vocabulary. Only tensors count: not CUDA's context, NCCL's buffers or what the allocator cannot use again.
"""

from functools import lru_cache
from typing import NamedTuple

from model import LOGITS_BYTES
from pipeline_parallel import SENDS_IN_FLIGHT
from schedules import Action


class Sizes:
    """Parameters (elements) and activations (bytes of one micro-batch) of a layer, the head, a boundary on a tp rank.

    The comments on activations name what autograd saves, each tensor once. h hidden, q, kv, mlp, vocab: this rank's
    widths of query, key, intermediate, logits.
    """

    def __init__(self, config):
        m, t, d = config.model, config.training, config.distributed
        self.element = {"bfloat16": 2, "float32": 4, "float64": 8}[m.dtype]  # bytes: weights and activations
        self.wide = max(self.element, 4)  # bytes: gradients in their buckets, optimizer, softmax
        self.converted = self.wide if self.wide > self.element else 0  # bytes: a copy in float32, where that is one
        self.recompute_every = {"none": 0, "layer": 1}.get(m.recompute, m.recompute)
        self.recomputed_share = 1 / self.recompute_every if self.recompute_every else 0
        h, mlp, vocab = m.hidden_size, m.intermediate_size // d.tp_size, -(-m.vocab_size // d.tp_size)
        q, kv = (heads * m.head_dim // d.tp_size for heads in (m.num_attention_heads, m.num_key_value_heads))
        tokens = t.micro_batch_size * t.seq_length
        own_tokens = tokens // d.tp_size if d.sequence_parallel else tokens  # in the norms and between the blocks

        self.hidden, self.table, self.largest_matrix = h, h * vocab, h * max(q, mlp)
        self.replicated = h * (2 + m.attention_bias)  # norms, and the bias that is added after the sum over tp
        self.matrices = h * (2 * q + 2 * kv + 3 * mlp)
        self.layer_parameters = self.matrices + m.attention_bias * (q + 2 * kv) + self.replicated

        self.boundary = self.element * own_tokens * h
        self.stream = self.element * tokens * h
        self.product = self.element * tokens * mlp
        self.token_numbers = 9 * tokens  # int64, and a mask of those that are another tp rank's
        self.norm = own_tokens * (self.wide + h * self.element)  # 1/rms and the norm's input
        attention = h + (q + 2 * kv) + q  # the norm's output; query and key, rotated, and value; output
        mlp_block = h + 3 * mlp  # the norm's output; gate, up, product
        row_sums = self.wide * tokens * m.num_attention_heads // d.tp_size  # flash attention keeps no more of softmax
        self.layer = 2 * self.norm + self.element * tokens * (attention + mlp_block) + row_sums
        matrix_inputs, matrix_gradients = 2 * h + q + mlp, 2 * h + q + 2 * kv + 2 * mlp
        self.layer_left = self.element * tokens * (matrix_inputs + matrix_gradients)  # from I to W

        num_pieces = min(-(-4 * tokens * vocab // LOGITS_BYTES), t.seq_length)  # as in model.head_loss
        self.recomputes_logits = num_pieces > 1
        piece = t.micro_batch_size * -(-t.seq_length // num_pieces) * vocab
        self.softmax = 0 if self.recomputes_logits else self.wide * piece  # kept
        self.logits_forward = piece * (self.element + self.wide + self.converted)  # beside the softmax: logits
        self.logits_backward = self.wide * piece + (self.element * piece if self.converted else 0)  # their gradient
        self.logits_left = self.element * tokens * vocab
        # What the loss reduces over tp: the largest logit, a sum and the target's logit of every token.
        self.loss_sums = 2 * (1 + self.recomputes_logits) * tokens * (self.element + 2 * self.wide)

    def weight_gradient(self, elements):
        """Until it is in its bucket: itself and, on its way there, its copy in float32."""
        return elements * (self.element + self.converted)


class Held(NamedTuple):
    """Bytes at some moment."""

    activations: int = 0
    logits: int = 0
    temporary: int = 0

    def plus(self, other, sign=1):
        return Held(*(mine + sign * its for mine, its in zip(self, other, strict=True)))


class Stage:
    """One stage: its parameters, and what a micro-batch holds there, `kept` from F to B or I and `left` from I to W."""

    def __init__(self, sizes, layers, is_first, is_last, owns_head, sequence_parallel=False):
        self.sizes, self.is_first, self.is_last = sizes, is_first, is_last
        self.parameters = len(layers) * sizes.layer_parameters + is_first * sizes.table
        self.parameters += is_last * (sizes.hidden + owns_head * sizes.table)
        self.replicated = len(layers) * sizes.replicated + is_last * sizes.hidden
        recomputed = [bool(sizes.recompute_every and i % sizes.recompute_every == 0) for i in layers]
        self.layers = [sizes.boundary if again else sizes.layer for again in recomputed]  # what each keeps
        self.head = is_last * (sizes.norm + sizes.stream + sizes.token_numbers)
        self.kept = Held(is_first * sizes.token_numbers + sum(self.layers) + self.head, is_last * sizes.softmax)
        self.left = Held(len(layers) * sizes.layer_left + is_last * sizes.stream, is_last * sizes.logits_left)
        # In all-gathers of the stream (an all-reduce is two): four each way in a layer, two in the embedding and before
        # the head. Recomputation ends with the last tensor that it needs, before the layer's last reduction.
        self.gathers = sum(8 + again * (3 if sequence_parallel else 2) for again in recomputed) + 2 * (
            is_first + is_last
        )

    def moments(self, kind):
        """The moments of an action that may need most: what they hold beyond what is held before it (F: after it)."""
        sizes, weight_gradient = self.sizes, self.sizes.weight_gradient
        if kind == "F":
            yield Held(logits=self.is_last * (sizes.logits_forward - sizes.softmax))
        elif kind == "W":
            yield Held(temporary=weight_gradient(sizes.table if self.is_last else sizes.largest_matrix))
        else:  # from the loss down to the tokens; what lies behind is freed
            now = kind == "B"  # I leaves the matrices' gradients over
            if self.is_last:
                yield Held(logits=sizes.recomputes_logits * sizes.logits_forward)
                gradient = sizes.logits_backward - sizes.softmax  # takes the softmax's place
                yield Held(0, gradient, sizes.stream + now * weight_gradient(sizes.table))
            freed = self.head
            for kept in reversed(self.layers):
                # The stream's gradient and a copy; the product's and a weight's, then gate's and up's.
                gradients = 2 * sizes.stream + sizes.product
                gradients += max(sizes.product, now * weight_gradient(sizes.largest_matrix))
                yield Held(sizes.layer - kept - freed, -self.kept.logits, gradients)
                freed += kept
            if self.is_first:
                yield Held(-freed, -self.kept.logits, sizes.stream + weight_gradient(sizes.table))


@lru_cache
def actions_and_sends(timetable):
    """Of every rank: [(kind, chunk, number of boundary tensors that wait meanwhile), …], and how many it sends in all.

    As PipelineExecutor has them: received and not yet used, made and not yet sent, and the sends in flight.
    """
    ranks, last = [], timetable.num_stages - 1
    for rank, stages in enumerate(timetable.stages):
        actions, waiting, leaving, num_sends = [], 0, [], 0
        for step in timetable.rank_program(rank):
            if isinstance(step, Action):
                ends = (stages[step.chunk] == 0, stages[step.chunk] == last)  # no input there, or no result
                no_input, no_result = (True, True) if step.kind == "W" else ends if step.kind == "F" else ends[::-1]
                waiting -= not no_input
                actions.append((step.kind, step.chunk, waiting + sum(leaving)))
                waiting += not no_result
            else:
                sends = sum(transfer.source_rank == rank for transfer in step)
                waiting += len(step) - 2 * sends
                leaving, num_sends = [*leaving, sends][-SENDS_IN_FLIGHT:], num_sends + sends
        ranks.append((actions, num_sends))
    return ranks


def rank_memory(actions, stages, boundary):
    """The largest sum of a step as (Held, bytes of boundary tensors). stages: the rank's own, by chunk."""
    held, moments = Held(), []
    for kind, chunk, waiting in actions:
        stage = stages[chunk]
        if kind == "F":
            held = held.plus(stage.kept)
        moments += [(held.plus(moment), waiting * boundary) for moment in stage.moments(kind)]
        if kind in "BI":
            held = held.plus(stage.kept, -1)
        if kind in "IW":
            held = held.plus(stage.left, 1 if kind == "I" else -1)
    return max(moments, key=lambda moment: sum(moment[0]) + moment[1])
