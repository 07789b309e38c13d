"""Mixtures of experts, as transformers 5.23 trains them on CUDA.

``integrations/moe.py`` sorts the pairs of token and expert by expert, copies each token's row once
for every expert it goes to, runs all experts' matrices in two grouped products
(``grouped_mm_experts_forward``), weights the rows, puts them back in order and sums each token's.
So most of it has ``tokens x experts per token`` rows, and each layer's experts are two weights.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.splits import Sharing
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ExpertShare, Tensor
from memplan.graph.experts.products import grouped_matmul
from memplan.graph.experts.routing import route, take
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.products import trained_weight
from memplan.graph.stack_context import StackContext
from memplan.model.mixtures import MixtureSpec
from memplan.model.parameters import LayerBlock
from memplan.training.choices_of_kernels.kernels import ExpertKernel


def mixture(t: Tape, x: Tensor, spec: MixtureSpec, context: StackContext) -> Tensor:
    """Router, routed experts and the shared expert."""
    hidden_size = context.hidden_size
    weights, chosen, logits = route(t, x, spec, hidden_size)
    routed = run_experts(t, x, weights, chosen, spec, hidden_size)
    shared = _shared(t, x, spec, hidden_size)
    out = t.cast(t.add(routed, shared), x.dtype)
    t.touch(x, routed, shared, logits, weights, chosen)
    return out


def run_experts(
    t: Tape, x: Tensor, weights: Tensor, chosen: Tensor, spec: MixtureSpec, hidden_size: int
) -> Tensor:
    """The routed experts: all of them, or a rank's share of each."""

    def product(given: Tensor, scores: Tensor) -> Tensor:
        experts = routed_experts
        if t.kernels.experts is ExpertKernel.MODULES:
            from memplan.graph.experts.modules import experts_in_turn as experts
        return experts(t, given, scores, chosen, spec, hidden_size)

    t.block = LayerBlock.EXPERTS
    spread = t.options.expert_parallel
    if spread is not None:
        from memplan.graph.experts.parallel import dispatched_experts  # only then

        out = dispatched_experts(t, spread, x, weights, chosen, spec, hidden_size)
        t.block = LayerBlock.NETWORK
        return out
    group = t.options.tensor_parallel
    if group is None:
        out = product(x, weights)
    else:
        from memplan.graph.splitting.tensor_parallel import split_experts  # only then

        out = split_experts(t, group, x, weights, product)
    t.block = LayerBlock.NETWORK
    return out


def _shared(t: Tape, x: Tensor, spec: MixtureSpec, hidden_size: int) -> Tensor:
    from memplan.graph.feed_forward import feed_forward

    assert spec.shared is not None
    group = t.options.tensor_parallel
    sharing = t.options.split_plan.shared
    if group is not None and group.sequence:
        sharing = Sharing.PARTIAL
    t.block = LayerBlock.SHARED_EXPERT
    # Where routed experts are sent a rank's own tokens, the shared one gathers all ranks' by itself.
    if group is not None and t.options.expert_parallel is not None:
        from memplan.graph.splitting.tensor_parallel import add_up, gather_sequence  # only then

        x = gather_sequence(t, group, x)
        out = feed_forward(t, x, spec.shared, hidden_size, "mlp.shared_experts", sharing=sharing)
        out = add_up(t, group, out)
    else:
        out = feed_forward(t, x, spec.shared, hidden_size, "mlp.shared_experts", sharing=sharing)
    t.block = LayerBlock.NETWORK
    return out


def routed_experts(
    t: Tape, x: Tensor, weights: Tensor, chosen: Tensor, spec: MixtureSpec, hidden_size: int
) -> Tensor:
    """``grouped_mm_experts_forward``: sort, copy, two grouped products, weight, put back, sum."""
    rows = chosen.numel
    by_expert, order = t.tensor(rows, DType.INT64), t.tensor(rows, DType.INT64)
    t.record(OperationKind.SORT, (chosen,), (by_expert, order))
    sources = t.tensor(rows, DType.INT64)
    t.record(OperationKind.FLOOR_DIVIDE, (order,), (sources,))
    selected = take(t, x, sources, rows * hidden_size)
    row_weights = take(t, weights, order, rows)
    offsets = _offsets(t, by_expert, spec.num_experts)
    inner, frame = expert_products(t, selected, offsets, spec, hidden_size)
    weighted = t.mul(inner, row_weights)
    inverse = t.tensor(rows, DType.INT64)
    t.record(OperationKind.ARANGE, (), (inverse,), forward_scratch_bytes=inverse.storage.num_bytes)
    ordered = take(t, weighted, inverse, weighted.numel)
    out = sum_of_rows(t, ordered, x.numel)
    result = t.cast(out, x.dtype)
    t.touch(*frame)
    t.touch(by_expert, order, selected, row_weights, offsets, inner, inverse, ordered, out)
    return result


def _offsets(t: Tape, by_expert: Tensor, num_experts: int) -> Tensor:
    """Where each expert's rows end."""
    ids = t.tensor(by_expert.numel, DType.INT32)
    t.record(OperationKind.TO, (by_expert,), (ids,))
    counts, offsets = t.tensor(num_experts, DType.INT32), t.tensor(num_experts, DType.INT32)
    t.record(OperationKind.HISTC, (ids,), (counts,))
    t.record(OperationKind.CUMSUM, (counts,), (offsets,))
    t.touch(ids)
    return offsets


def expert_products(
    t: Tape, x: Tensor, offsets: Tensor, spec: MixtureSpec, hidden_size: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Every expert's gate and up, activation, and down, on the rows sorted by expert.

    Also returns what the caller's frame still holds: weights with their adapters.
    """
    inner = spec.expert.intermediate_size
    name = "mlp.experts.gate_up_proj"
    experts = ExpertShare(spec.num_experts, spec.num_experts_per_token, 2)
    weight = t.parameter(name, spec.num_experts, 2 * inner, hidden_size, experts=experts)
    first_factor = trained_weight(t, weight)
    both = grouped_matmul(t, x, weight, offsets, first_factor)
    middle = _expert_activation(t, both, spec)
    t.touch(both)
    experts = ExpertShare(spec.num_experts, spec.num_experts_per_token)
    name = "mlp.experts.down_proj"
    weight = t.parameter(name, spec.num_experts, hidden_size, inner, experts=experts)
    factor = trained_weight(t, weight)
    return grouped_matmul(t, middle, weight, offsets, factor), (first_factor, factor)


def _expert_activation(t: Tape, both: Tensor, spec: MixtureSpec) -> Tensor:
    gate, up = t.split(both, both.numel // 2, both.numel // 2)
    if spec.expert.clamped:
        from memplan.graph.feed_forward import clamped_product

        return clamped_product(t, gate, up, spec.expert, "mlp.experts")
    return t.mul(activation_module(t, gate, spec.expert.activation, "mlp.experts.act_fn"), up)


def sum_of_rows(t: Tape, x: Tensor, numel: int) -> Tensor:
    """Sum each token's rows, in fp32 under autocast; backward spreads the gradient and copies it out to
    every row, which casting it does already."""
    dtype = DType.FP32 if t.autocast is not None else x.dtype
    kinds = Gradient.FRESH, Gradient.ALIAS
    if dtype is not x.dtype:
        kinds = Gradient.SEEN, Gradient.FRESH
    rows = t.view(x, x.numel)
    t.record(OperationKind.VIEW, (x,), (rows,), gradients=kinds[:1])
    out = t.tensor(numel, dtype)
    t.record(OperationKind.SUM, (rows,), (out,), gradients=kinds[1:])
    return out
