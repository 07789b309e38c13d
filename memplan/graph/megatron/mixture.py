"""Megatron-core's mixture of experts over TransformerEngine: grouped products, tokens sent all to all.

Megatron-core 0.16.1, core/transformer/moe/moe_layer.py, token_dispatcher.py (``MoEAlltoAllTokenDispatcher``),
experts.py (``TEGroupedMLP``), router.py, shared_experts.py; ``moe_permute_fusion``. Each expert is given as many
tokens as the others: what ``moe_expert_capacity_factor`` 1 with ``moe_pad_expert_input_to_capacity`` makes so.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import ExpertShare, Tensor
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.elementwise import swiglu
from memplan.graph.megatron.narrow import narrow_formats, narrow_product
from memplan.graph.megatron.norms import norm
from memplan.graph.megatron.parallel import multiplied, weight_of
from memplan.graph.megatron.recomputation import discard, recompute_since
from memplan.graph.megatron.transformer_engine import column_linear, linear
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormSpec
from memplan.training.splitting.exchange import ExchangeKind, Group, Send, Sends, both_ways
from memplan.training.splitting.megatron import RecomputeModule


def mixture(
    c: MegatronContext, x: Tensor, spec: MixtureSpec, layer_norm: NormSpec, prefix: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Shared and routed experts added up, and what the layer's variables hold meanwhile."""
    t, name, settings = c.tape, f"{prefix}mlp", c.settings
    first = len(t.segment.operations)
    normed = norm(c, x, layer_norm, f"{prefix}pre_mlp_layernorm", c.hidden_size)
    out = routed(c, normed, spec, name)
    if settings.recomputes(RecomputeModule.MOE):
        recompute_since(c, first + 1, (normed,))
    if settings.recomputes(RecomputeModule.LAYERNORM):
        discard(c, first, first + 1, (normed,))
        return out, ()
    return out, (normed,)


def routed(c: MegatronContext, normed: Tensor, spec: MixtureSpec, name: str) -> Tensor:
    """Routed experts, and beside them shared ones."""
    t = c.tape
    shared = None
    if spec.shared is not None:
        start = len(t.segment.operations)
        shared = _shared(c, normed, spec.shared, f"{name}.shared_experts")
        if c.settings.recomputes(RecomputeModule.SHARED_EXPERTS):
            recompute_since(c, start, (normed,))
    weights = _routed(c, normed, spec, name)
    rows = c.stream_tokens * spec.num_experts_per_token
    sent = _permuted(c, normed, weights, rows, spec)
    came = _sent(c, *sent)
    given, chances = _gathered(c, *came)
    if spec.num_experts // c.experts > 1:
        given, chances = t.contiguous(given), t.contiguous(chances)
    done = _experts(c, given, chances, spec, name)
    back = t.contiguous(done) if spec.num_experts // c.experts > 1 else done
    part = _scattered(c, back)
    t.touch(given, chances, done, back)
    (returned,) = _sent(c, part)
    out = t.tensor(c.stream_tokens * c.hidden_size, c.dtype)
    t.record(OperationKind.INDEX_ADD_IN_PLACE, (returned,), (out,), gradients=(Gradient.FRESH,))
    if shared is not None:
        out = t.add(out, shared)
        t.touch(shared)
    t.touch(*sent, *came, returned)
    return out


def _shared(c: MegatronContext, x: Tensor, spec: FeedForwardSpec, name: str) -> Tensor:
    """A dense network beside the routed ones."""
    width = spec.intermediate_size
    up = weight_of(c, f"{name}.linear_fc1", 2 * width, c.hidden_size)
    down = weight_of(c, f"{name}.linear_fc2", c.hidden_size, width)
    wide = column_linear(c, x, up)
    active = swiglu(c, wide)
    out = linear(c, active, down)
    c.tape.touch(wide, active)
    return out


def _routed(c: MegatronContext, x: Tensor, spec: MixtureSpec, name: str) -> Tensor:
    """Logits in fp32, scores that are kept, and the weights of each token's experts in a sparse table.

    A boolean table says which experts those are.
    """
    t = c.tape
    rows, experts = c.stream_tokens, spec.num_experts
    weight = t.parameter(f"{name}.router.weight", experts, c.hidden_size)
    logits = t.tensor(rows * experts, DType.FP32)
    wide = x.numel * DType.FP32.num_bytes
    t.record(
        OperationKind.ROUTER_LOGITS, (x, weight), (logits,), saves=(x, weight),
        gradients=(Gradient.FRESH, Gradient.FRESH), forward_scratch_bytes=(wide, RESULT),
        backward_scratch_bytes=(wide, RESULT), flops=2 * x.numel * experts, in_python=True,
    )  # fmt: skip
    scores = t.elementwise(OperationKind.SIGMOID, logits)
    chosen = t.tensor(rows * spec.num_experts_per_token, DType.FP32)
    ids = t.tensor(rows * spec.num_experts_per_token, DType.INT64)
    t.record(
        OperationKind.TOPK, (scores,), (chosen, ids), saves=(ids, chosen),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    weights, which = t.tensor(rows * experts, DType.FP32), t.tensor(rows * experts, DType.BOOL)
    t.record(
        OperationKind.SCATTER, (chosen, ids), (weights, which), saves=(ids, which),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.touch(logits, scores, weights)
    return weights


def _permuted(
    c: MegatronContext, x: Tensor, weights: Tensor, rows: int, spec: MixtureSpec
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert with their weights; a map of rows is kept (``fused_permute_with_probs``)."""
    t = c.tape
    places = t.tensor(c.stream_tokens * (2 * spec.num_experts + 1), DType.INT32)
    out, chances = t.tensor(rows * c.hidden_size, c.dtype), t.tensor(rows, DType.FP32)
    t.record(
        OperationKind.INDEX, (x, weights), (places, out, chances), saves=(places,),
        gradients=(Gradient.FRESH, Gradient.FRESH), in_python=True,
    )  # fmt: skip
    return out, chances


def _sent(c: MegatronContext, *given: Tensor) -> tuple[Tensor, ...]:
    """As much comes as goes."""
    if c.experts == 1:
        return given
    t = c.tape
    outs = []
    for each in given:
        out = t.tensor(each.numel, each.dtype)
        size = each.numel * each.dtype.num_bytes
        t.record(
            OperationKind.ALL_TO_ALL, (each,), (out,), gradients=(Gradient.FRESH,),
            sends=both_ways(ExchangeKind.ALL_TO_ALL, size, Group.SPREAD),
        )  # fmt: skip
        outs.append(out)
    return tuple(outs)


def _gathered(c: MegatronContext, *given: Tensor) -> tuple[Tensor, ...]:
    """The rows of all ranks that each expert is split over; in backward added up into shares."""
    if c.expert_degree == 1:
        return given
    t = c.tape
    outs = []
    for each in given:
        out = t.tensor(each.numel * c.expert_degree, each.dtype)
        size = out.numel * out.dtype.num_bytes
        t.record(
            OperationKind.ALL_GATHER, (each,), (out,), gradients=(Gradient.FRESH,),
            sends=_there_and_back(ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER, size),
        )  # fmt: skip
        outs.append(out)
    return tuple(outs)


def _scattered(c: MegatronContext, x: Tensor) -> Tensor:
    """Partial results added up into shares, in the format of the chances."""
    if c.expert_degree == 1:
        return x
    t = c.tape
    wide = t.cast(x, DType.FP32)
    part = t.tensor(x.numel // c.expert_degree, DType.FP32)
    size = wide.numel * DType.FP32.num_bytes
    t.record(
        OperationKind.REDUCE_SCATTER, (wide,), (part,), gradients=(Gradient.FRESH,),
        sends=_there_and_back(ExchangeKind.REDUCE_SCATTER, ExchangeKind.ALL_GATHER, size),
    )  # fmt: skip
    return t.cast(part, x.dtype)


def _there_and_back(there: ExchangeKind, back: ExchangeKind, num_bytes: int) -> Sends:
    forward, backward = (Send(kind, num_bytes, Group.EXPERT) for kind in (there, back))
    return Sends((forward,), (backward,))


def _experts(
    c: MegatronContext, x: Tensor, chances: Tensor, spec: MixtureSpec, name: str
) -> Tensor:
    """Two grouped products around a weighted SwiGLU, which keeps its input and the weights."""
    t, expert = c.tape, spec.expert
    width = expert.intermediate_size
    wide = _grouped(c, x, spec, f"{name}.experts.linear_fc1", 2 * width, c.hidden_size)
    start = len(t.segment.operations)
    active = t.tensor(wide.numel // 2, wide.dtype)
    t.record(
        OperationKind.FUSED_GATE, (wide, chances), (active,), saves=(wide, chances),
        gradients=(Gradient.FRESH, Gradient.FRESH), in_python=True,
    )  # fmt: skip
    out = _grouped(c, active, spec, f"{name}.experts.linear_fc2", c.hidden_size, width)
    t.touch(wide, active)
    if c.settings.recomputes(RecomputeModule.MOE_ACT):
        discard(c, start, start + 1, (active,))
    return out


def _grouped(
    c: MegatronContext, x: Tensor, spec: MixtureSpec, name: str, out_features: int, in_features: int
) -> Tensor:
    """TransformerEngine's ``GroupedLinear``: a weight of its own for each of this rank's experts."""
    t = c.tape
    local = spec.num_experts // c.experts
    share = ExpertShare(local, spec.num_experts_per_token)
    weight = t.parameter(f"{name}.weight", local * out_features, in_features, experts=share)
    weight.ranks = c.experts * c.expert_degree
    rows = x.numel // in_features
    flops, formats = 2 * rows * in_features * out_features, narrow_formats(c)
    if formats is not None:
        return narrow_product(c, formats, x, weight, rows * out_features, flops=flops, rows=rows)
    return multiplied(c, x, weight, rows * out_features, flops=flops)
