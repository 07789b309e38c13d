"""Falcon's layers: torch's attention called directly, other products, sums in place.

``FalconLinear`` multiplies by the transposed weight, which autocast does not keep a cached copy of,
and adds its bias in a second operation. The mask is always made, so torch's dispatcher never sees a
causal call (``FalconModel.forward``, ``allow_is_causal_skip=False``; transformers 5.23).
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import (
    Shape,
    batched_matmul,
    broadcast,
    merged_heads,
    spread_head,
)
from memplan.graph.attention.masks import additive_mask, causal_pattern
from memplan.graph.attention.paths import sdpa
from memplan.graph.attention.rotary import rotate
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import norm
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.attention import AttentionForm, AttentionSpec, Projection
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.training.kernels import AttentionKernel


def direct_layer(
    t: Tape, x: Tensor, layer: LayerSpec, spec: AttentionSpec, context: StackContext
) -> Tensor:
    """``FalconDecoderLayer``: in a row, or side by side with one norm or two."""
    hidden = context.hidden_size
    # A checkpointed layer's arguments are kept, whether it reads them or not.
    passed = (context.cos, context.sin, context.alibi, context.mask)
    t.record(OperationKind.ARGUMENTS, [each for each in passed if each is not None], ())
    normed = norm(t, x, layer.norm, "input_layernorm", hidden)
    read = normed
    if layer.placement is NormPlacement.PARALLEL:
        read = norm(t, x, layer.norm, "ln_mlp", hidden)
    t.block = LayerBlock.ATTENTION
    attended = _attention(t, normed, spec, context)
    t.block = LayerBlock.NETWORK
    residual = x
    if layer.placement is NormPlacement.PRE:
        residual = t.add(x, dropout(t, attended, spec.dropout))
        read = norm(t, residual, layer.norm, "post_attention_layernorm", hidden)
    assert isinstance(layer.feed_forward, FeedForwardSpec)
    fed = _feed_forward(t, read, layer.feed_forward, hidden)
    if layer.placement is not NormPlacement.PRE:
        fed = _add_in_place(t, fed, attended)
    out = t.add(residual, dropout(t, fed, layer.dropout))
    t.touch(normed, read, attended, fed, residual)
    return out


def direct_masks(t: Tape, spec: AttentionSpec, context: StackContext) -> None:
    """The mask that every layer is given; with ALiBi one that holds each head's bias too."""
    eager = t.kernels.attention is AttentionKernel.EAGER
    length = context.seq_len
    if context.mask is None:
        context.mask = causal_pattern(t, length, length)
        t.hold(context.mask)
    if spec.form is not AttentionForm.DIRECT_ALIBI:
        return
    context.alibi = t.tensor(context.batch * spec.num_heads * length, t.compute)
    t.record(OperationKind.MUL, (), (context.alibi,))
    t.hold(context.alibi)
    pattern = context.mask
    pattern.storage.held = False
    if not eager:
        pattern = additive_mask(t, pattern, context.batch, t.compute)
    lower = t.tensor(pattern.numel, DType.BOOL)
    t.record(OperationKind.LT, (pattern,), (lower,))
    context.mask = t.tensor(context.batch * spec.num_heads * length * length, t.compute)
    t.record(OperationKind.MASKED_FILL, (lower,), (context.mask,))
    t.touch(pattern)
    t.hold(context.mask)


def _product(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """``FalconLinear``, and what an adapter adds to it."""
    adaptation = t.adaptation if name in t.adapted else None
    if adaptation is not None:
        x = adaptation.before_linear(t, x, in_features, name)
    weight = t.parameter(f"{name}.weight", out_features, in_features, role=role)
    addend = t.parameter(f"{name}.bias", out_features, role=WeightRole.OTHER) if bias else None
    out = _base_product(t, x, weight, addend)
    return out if adaptation is None else adaptation.beside_linear(t, x, out, weight, addend, name)


def _base_product(t: Tape, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    out_features, in_features = weight.shape
    given = x
    factor: Tensor = weight
    if t.autocast is not None:
        # C++ evaluates the arguments of autocast's wrapper from the last to the first.
        factor = t.cast(weight, t.autocast)
        x = t.cast(x, t.autocast)
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    saves = [factor] if x.requires_grad else []
    if weight.requires_grad:
        saves.append(x)
    t.record(
        OperationKind.LINEAR, (x, factor), (out,), saves=saves, gradients=(Gradient.VIEW, Gradient.VIEW),
        flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    if bias is not None:
        out = t.add(out, bias)
    t.touch(given)
    return out


def _feed_forward(t: Tape, x: Tensor, spec: FeedForwardSpec, hidden_size: int) -> Tensor:
    inner = spec.intermediate_size
    up = _product(t, x, "mlp.dense_h_to_4h", hidden_size, inner, bias=spec.bias)
    active = activation_module(t, up, spec.activation, "mlp.act")
    t.touch(up, x)
    out = _product(t, active, "mlp.dense_4h_to_h", inner, hidden_size, bias=spec.bias)
    t.touch(active)
    return out


def _add_in_place(t: Tape, left: Tensor, right: Tensor) -> Tensor:
    out = t.view(left, left.numel)
    t.record(
        OperationKind.ADD_IN_PLACE,
        (left, right),
        (out,),
        gradients=(Gradient.ALIAS, Gradient.ALIAS),
    )
    return out


def _attention(t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext) -> Tensor:
    hidden, width = context.hidden_size, spec.num_heads * spec.head_dim
    fused_width = width + 2 * spec.num_kv_heads * spec.head_dim
    fused = _product(
        t, x, "self_attention.query_key_value", hidden, fused_width, bias=spec.query_bias
    )
    query, key, value = _split(t, fused, spec)
    if spec.form is AttentionForm.DIRECT and context.cos is not None and context.sin is not None:
        query, key = rotate(t, query, key, spec, context.cos, context.sin)
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    if t.kernels.attention is AttentionKernel.EAGER:
        out = _written_out(t, query, key, value, shape, context, x.dtype)
    else:
        out = _kernel(t, query, key, value, shape, context)
    out = _product(
        t,
        out,
        "self_attention.dense",
        width,
        hidden,
        bias=spec.output_bias,
        role=WeightRole.ATTENTION_OUTPUT,
    )
    t.touch(x, fused, query, key, value, *context.attention_frame)
    context.attention_frame = ()
    return out


def _split(t: Tape, fused: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """``_split_heads``: views, but keys and values picked by a list are copied."""
    tokens = fused.numel // ((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    query_size = tokens * spec.num_heads * spec.head_dim
    kv_size = tokens * spec.num_kv_heads * spec.head_dim
    if spec.num_kv_heads == spec.num_heads and spec.projection is Projection.FUSED_SELECTED:
        return t.slice(fused, kv_size), t.slice(fused, kv_size), t.slice(fused, kv_size)
    query = t.slice(fused, query_size)
    key, value = (t.contiguous(t.slice(fused, kv_size)) for _ in range(2))
    if spec.projection is Projection.FUSED_INTERLEAVED:
        picked = (key, value)
        query = t.contiguous(query)
        key, value = broadcast(t, key, query_size), broadcast(t, value, query_size)
        t.touch(*picked)
    return query, key, value


def _kernel(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """torch's dispatcher, given a mask; a single key head is handed over as it is.

    Fake tensors are not asked whether a kernel could: there a fused one reads that head for all.
    """
    if t.autocast is not None:
        query, key, value = (t.cast(each, t.autocast) for each in (query, key, value))
    if t.decomposed:
        key, value = _spread(t, key, query.numel), _spread(t, value, query.numel)
    return sdpa(t, query, key, value, shape, context.mask, spread=key.numel < query.numel)


def _spread(t: Tape, x: Tensor, numel: int) -> Tensor:
    """``expand``: a view, whose gradient is summed over the query heads."""
    if x.numel == numel:
        return x
    out = t.view(x, numel)
    t.record(OperationKind.EXPAND, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _heads(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """A product's factor: a single head is spread over all, unless there is one sequence."""
    if x.numel == shape.batch * shape.keys * shape.spec.head_dim and shape.spec.num_heads > 1:
        return spread_head(t, x, shape)
    return merged_heads(t, x, shape)


def _written_out(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    context: StackContext,
    dtype: DType,
) -> Tensor:
    """Scores plus mask, softmax in the dtype of the hidden states, weighted values."""
    assert context.mask is not None
    spec = shape.spec
    scores = batched_matmul(
        t, _heads(t, query, shape), _heads(t, key, shape), shape.scores, spec.head_dim
    )
    product = scores
    if spec.form is AttentionForm.DIRECT_ALIBI and context.alibi is not None:
        wide = t.cast(scores, DType.FP32)
        product = t.add(wide, context.alibi)
        context.attention_frame = (scores, wide, product)
    summed = t.add(product, context.mask)
    weights = softmax(t, summed, dtype=dtype)
    t.touch(product, summed)
    if spec.form is AttentionForm.DIRECT_ALIBI:
        weights = dropout(t, weights, spec.dropout)
    t.linger(weights)
    t.carry(weights)
    out = batched_matmul(t, weights, _heads(t, value, shape), query.numel, shape.keys)
    return t.contiguous(out) if shape.batch == 1 else t.scale(out, OperationKind.CLONE)
