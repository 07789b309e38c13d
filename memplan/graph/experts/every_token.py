"""Experts that all multiply every token, as ``Llama4TextMoe`` trains them.

Each expert is given a copy of all tokens, times its score, which is 0 where a token has not chosen it.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ExpertShare, Parameter, Tensor
from memplan.graph.feed_forward import feed_forward
from memplan.graph.operations.activations import activation
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.mixtures import EveryTokenSpec
from memplan.model.parameters import LayerBlock, WeightRole


def every_token(t: Tape, x: Tensor, spec: EveryTokenSpec, context: StackContext) -> Tensor:
    """Scores, all experts on all tokens, the shared expert, the sum."""
    hidden = context.hidden_size
    flat = t.flatten(x)
    logits = linear(t, flat, "mlp.router", hidden, spec.num_experts, role=WeightRole.ROUTER)
    scores = _scores(t, logits, spec)
    t.block = LayerBlock.EXPERTS
    copies = t.tensor(spec.num_experts * flat.numel, flat.dtype)
    t.record(OperationKind.REPEAT, (flat,), (copies,), gradients=(Gradient.FRESH,))
    routed = _experts(t, t.mul(copies, t.contiguous(scores)), spec, hidden)
    t.block = LayerBlock.SHARED_EXPERT
    shared = feed_forward(t, flat, spec.expert, hidden, "mlp.shared_expert")
    t.block = LayerBlock.NETWORK
    out = _added(t, shared, routed, flat.numel)
    t.touch(x, scores, routed)
    t.linger(logits)
    return out


def _scores(t: Tape, logits: Tensor, spec: EveryTokenSpec) -> Tensor:
    """Sigmoids of the largest logits, zeros for the others."""
    tokens = logits.numel // spec.num_experts
    count = tokens * spec.num_chosen
    values, places = t.tensor(count, logits.dtype), t.tensor(count, DType.INT64)
    t.record(
        OperationKind.TOPK, (logits,), (values, places), saves=(places,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    spread = t.tensor(logits.numel, logits.dtype)
    t.record(
        OperationKind.SCATTER, (values, places), (spread,), saves=(places,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    curve = t.elementwise(OperationKind.SIGMOID, t.cast(spread, DType.FP32))
    scores = t.cast(curve, spread.dtype)
    t.touch(spread, values)
    return scores


def _experts(t: Tape, x: Tensor, spec: EveryTokenSpec, hidden: int) -> Tensor:
    """``Llama4TextExperts``: two batched products, one expert after another."""
    inner = spec.expert.intermediate_size
    rows = x.numel // hidden
    fused = _weight(t, "gate_up_proj", spec, 2 * inner, hidden, num_matrices=2)
    both = _product(t, x, fused, rows * 2 * inner, hidden)
    gate, up = t.split(both, rows * inner, rows * inner)
    middle = t.mul(up, activation(t, gate, spec.expert.activation))
    down = _weight(t, "down_proj", spec, hidden, inner)
    out = _product(t, middle, down, rows * hidden, inner)
    t.touch(both)
    return out


def _weight(
    t: Tape, name: str, spec: EveryTokenSpec, outputs: int, inputs: int, *, num_matrices: int = 1
) -> Parameter:
    share = ExpertShare(spec.num_experts, spec.num_chosen, num_matrices)
    return t.parameter(f"mlp.experts.{name}", spec.num_experts, outputs, inputs, experts=share)


def _product(t: Tape, x: Tensor, weight: Parameter, numel: int, inner: int) -> Tensor:
    factor = t.cast_weight(weight)
    given = x if t.autocast is None else t.cast(x, t.autocast)
    out = t.tensor(numel, given.dtype)
    t.record(
        OperationKind.MATMUL, (given, factor), (out,), saves=(factor, given),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * numel * inner,
    )  # fmt: skip
    t.touch(x)
    return out


def _added(t: Tape, shared: Tensor, routed: Tensor, numel: int) -> Tensor:
    """``shared.add_(routed.sum(0))``; the sum's gradient is spread and copied out to every expert."""
    spread = t.view(routed, routed.numel)
    t.record(OperationKind.VIEW, (routed,), (spread,), gradients=(Gradient.FRESH,))
    total = t.tensor(numel, routed.dtype)
    t.record(OperationKind.SUM, (spread,), (total,), gradients=(Gradient.ALIAS,))
    out = t.view(shared, shared.numel)
    t.record(
        OperationKind.ADD_IN_PLACE, (shared, total), (out,),
        gradients=(Gradient.ALIAS, Gradient.ALIAS),
    )  # fmt: skip
    return out
