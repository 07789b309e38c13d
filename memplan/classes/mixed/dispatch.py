"""Experts spread over ranks: torchtitan's, in the place of a class's own.

(torchtitan 0.3.0, models/common/token_dispatcher.py, ``AllToAllTokenDispatcher``, and moe.py, ``GroupedExperts``)
"""

from math import ceil

from memplan.classes.mixed.experts import Experts
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import ExpertShare, Parameter, Tensor
from memplan.graph.experts.parallel import (
    added_up_rows,
    places_of,
    put_back,
    sent,
    sorted_pairs,
    token_counts,
)
from memplan.graph.experts.products import grouped_matmul
from memplan.graph.modules.functional import clamped, index, zeros
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.parameters import LayerBlock
from memplan.training.splitting.expert_parallel import ExpertParallel


class RoutedExperts(Module):
    """Pairs of token and expert are sorted, sent to the ranks that have the experts, multiplied there and
    sent back. The router is the model's own."""

    block = LayerBlock.EXPERTS

    def __init__(self, stacked: Experts) -> None:
        self.num_experts, self.num_active = stacked.num_experts, stacked.num_active
        _, hidden, inner = stacked.down_proj.shape
        self.add_matrices(hidden, inner)
        self.act_fn = stacked.act_fn

    def add_matrices(self, hidden: int, inner: int) -> None:
        """A rank's share of them is what ``declare`` makes."""
        self.w1 = Weight(self.num_experts, inner, hidden)
        self.w2 = Weight(self.num_experts, hidden, inner)
        self.w3 = Weight(self.num_experts, inner, hidden)

    @property
    def group(self) -> ExpertParallel:
        """The ranks among which experts are spread."""
        group = self.run.options.expert_parallel
        assert group is not None
        return group

    def declare(self, name: str, weight: Weight) -> Parameter:
        """A rank's own experts."""
        split, degree = self.run.options.tensor_parallel, self.group.degree
        count, *shape = weight.shape
        share = ExpertShare(
            count // degree, self.num_active, spread=degree,
            splitting=1 if split is None else split.degree,
        )  # fmt: skip
        made = self.run.parameter(name, count // degree, *shape, module=self.within, experts=share)
        made.ranks, made.is_distributed = degree, split is not None
        return made

    def forward(self, x: Handle, selected_experts: Handle, top_scores: Handle) -> Handle:
        """``RoutedExperts.forward``; how many pairs a rank is sent is an assumption."""
        run, (_, width) = self.run, x.shape
        pairs = selected_experts.numel
        routing, num_tokens = self._counts(selected_experts, x.shape[0])
        order = Handle(run, sorted_pairs(run, selected_experts.record, self.num_experts), (pairs,))
        scores = index(top_scores, order, (pairs, 1))
        sources = order.apart(OperationKind.FLOOR_DIVIDE)
        routed = index(x, sources, (pairs, width))
        given = ceil(pairs * self.group.imbalance.low)
        routed = self._sent(routed, given)
        places = Handle(run, places_of(run, given), (given,))
        permuted = index(routed, places, routed.shape)
        del routed
        out = self._products(permuted, routing, num_tokens)
        back = Handle(run, put_back(run, out.record, places.record), out.shape)
        back = self._sent(back, pairs)
        return self._combined(x, back, scores, sources)

    def _counts(self, selected_experts: Handle, tokens: int) -> tuple[Handle, Handle]:
        """Which token goes to which expert, and how many go to each."""
        shape = tokens, self.num_experts
        routing, counts = token_counts(self.run, selected_experts.record, tokens * self.num_experts)
        return Handle(self.run, routing, shape), Handle(self.run, counts, (1,))

    def _sent(self, x: Handle, rows: int) -> Handle:
        shape = rows, x.shape[-1]
        return Handle(x.run, sent(x.run, x.record, rows * shape[-1]), shape)

    def _products(self, x: Handle, routing: Handle, num_tokens: Handle) -> Handle:
        """``GroupedExperts.forward``: what a rank's experts make of the pairs that it was sent."""
        run = self.run
        offsets = empty(run, (self.num_experts // self.group.degree,), DType.INT32)
        run.record(
            OperationKind.CUMSUM, (routing.record, num_tokens.record), (offsets.record,),
            gradients=(),
        )  # fmt: skip
        return self.multiplied(x, offsets)

    def multiplied(self, x: Handle, offsets: Handle) -> Handle:
        """Gate, up and down, each a weight of its own."""
        dtype = x.dtype
        w1, w2, w3 = (self.parameter(each) for each in (self.w1, self.w2, self.w3))
        hidden = self.act_fn(product(x, w1, offsets))
        hidden = hidden * product(x, w3, offsets)
        return product(hidden, w2, offsets).to(dtype)

    def _combined(self, x: Handle, back: Handle, scores: Handle, sources: Handle) -> Handle:
        """Each pair weighted in fp32, and added up where its token is."""
        run, blank = self.run, zeros(x)
        weighted = (back.float() * scores).to(back.dtype)
        del back
        made = added_up_rows(run, blank.record, sources.record, weighted.record)
        return Handle(run, made, x.shape)


class RoutedPlainExperts(RoutedExperts):
    """Without a gate: two products, and the activation between them (NeMo AutoModel's ``up_projs`` and ``down_projs``,
    components/moe/experts.py)."""

    def add_matrices(self, hidden: int, inner: int) -> None:
        self.w1 = Weight(self.num_experts, inner, hidden)
        self.w2 = Weight(self.num_experts, hidden, inner)

    def multiplied(self, x: Handle, offsets: Handle) -> Handle:
        dtype = x.dtype
        w1, w2 = self.parameter(self.w1), self.parameter(self.w2)
        hidden: Handle = self.act_fn(product(x, w1, offsets))
        return product(hidden, w2, offsets).to(dtype)


class RoutedBiasedExperts(RoutedExperts):
    """gpt-oss's: gate and up in one product, a bias behind either (torchtitan 0.3.0, models/gpt_oss/moe.py)."""

    def add_matrices(self, hidden: int, inner: int) -> None:
        self.mlp1_weight = Weight(self.num_experts, 2 * inner, hidden)
        self.mlp1_bias = Weight(self.num_experts, 2 * inner)
        self.mlp2_weight = Weight(self.num_experts, hidden, inner)
        self.mlp2_bias = Weight(self.num_experts, hidden)

    def multiplied(self, x: Handle, offsets: Handle) -> Handle:
        """``GptOssGroupedExperts.forward``: rows behind the last expert's are counted as one expert more."""
        tail_slack = offsets.apart(OperationKind.SUB, shape=(1,))
        counts = concatenate(offsets, tail_slack).apart(OperationKind.TO, dtype=DType.INT64)
        h = product(x, self.parameter(self.mlp1_weight), offsets)
        b1 = self.with_slack(self.mlp1_bias)
        b1_rows = of_each_row(b1, counts, x.shape[0])
        h = h + b1_rows.to(h.dtype)
        h = gated(h)
        out = product(h, self.parameter(self.mlp2_weight), offsets)
        b2 = self.with_slack(self.mlp2_bias)
        b2_rows = of_each_row(b2, counts, x.shape[0])
        b2_rows = b2_rows.to(out.dtype)
        return out + b2_rows

    def with_slack(self, bias: Weight) -> Handle:
        """Zeros for the rows behind them all."""
        own = self.operand(bias)
        return concatenate(
            own, made_by(own.run, OperationKind.ZEROS, (1, own.shape[1]), own.dtype), dim=0
        )


def of_each_row(bias: Handle, counts: Handle, rows: int) -> Handle:
    """``bias.repeat_interleave(counts, dim=0)``: rows taken by numbers, which are kept."""
    run = bias.run
    numbers = empty(run, (rows,), DType.INT64)
    run.record(
        OperationKind.REPEAT_INTERLEAVE, (counts.record,), (numbers.record,),
        forward_scratch_bytes=counts.record.storage.num_bytes,
    )  # fmt: skip
    made = empty(run, (rows, bias.shape[1]), bias.dtype)
    run.record(
        OperationKind.INDEX_SELECT, (bias.record, numbers.record), (made.record,),
        saves=(numbers.record,), gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return made


def gated(x: Handle) -> Handle:
    """``swiglu``: gates and ups lie in turn, and both are clamped."""
    width = x.shape[-1] // 2
    gate = clamped(x.narrow(width), bounds=1)
    up = clamped(x.narrow(width), bounds=2)
    out_glu = gate * (gate * 1.702).unary(OperationKind.SIGMOID)
    made = empty(x.run, out_glu.shape, out_glu.dtype)
    size = made.record.storage.num_bytes
    x.run.record(
        OperationKind.ADDCMUL, (out_glu.record, out_glu.record, up.record), (made.record,),
        saves=(out_glu.record, up.record),
        gradients=(Gradient.ALIAS, Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=(RESULT, size, RESULT, ~1, size, RESULT),
    )  # fmt: skip
    return made


def routed(stacked: Experts) -> RoutedExperts:
    """What stands in the place of a class's own stacks."""
    if not stacked.is_gated:
        return RoutedPlainExperts(stacked)
    return (RoutedBiasedExperts if "down_proj_bias" in stacked.weights else RoutedExperts)(stacked)


def product(x: Handle, weight: Parameter, offsets: Handle) -> Handle:
    """A grouped product with a weight as it is."""
    made: Tensor = grouped_matmul(x.run, x.record, weight, offsets.record, weight)
    return Handle(x.run, made, (x.shape[0], weight.shape[1]))
