"""ConvBERT's attention: half of the heads attend, the other half convolve with kernels made for each token.

transformers 5.23, models/convbert/modeling_convbert.py, ``ConvBertSelfAttention`` and ``GroupedLinearLayer``.
"""

from memplan.graph.attention.head_layout import Shape, batched_matmul, merged_heads
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.convolutions import convolve
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.mixers import ConvolvedHeadsSpec, GroupedNetworkSpec
from memplan.model.parameters import WeightRole


def convolved_heads(t: Tape, x: Tensor, spec: ConvolvedHeadsSpec, context: StackContext) -> Tensor:
    """Projections, kernels, what they give, the scores' values, joined; the output projection."""
    hidden, scores = context.hidden_size, spec.scores
    width = scores.num_heads * scores.head_dim
    role = WeightRole.QUERY_KEY
    key = linear(t, x, "self_attn.k_proj", hidden, width, bias=True, role=role)
    value = linear(t, x, "self_attn.v_proj", hidden, width, bias=True)
    convolved = _separable(t, x, spec, hidden, width)
    query = linear(t, x, "self_attn.q_proj", hidden, width, bias=True, role=role)
    mixed = t.mul(convolved, query)
    kernels = _kernels(t, mixed, spec, width)
    found = _spans(t, x, kernels, spec, hidden, width)
    shape = Shape(context.batch, context.seq_len, context.seq_len, scores)
    attended, held = _attended(t, query, key, value, shape, context)
    joined = t.concatenate(attended, found)
    t.touch(query, key, value, mixed, found, *held)
    last = WeightRole.ATTENTION_OUTPUT
    out = linear(t, joined, "self_attn.o_proj", 2 * width, hidden, bias=True, role=last)
    t.touch(joined)
    return out


def _separable(t: Tape, x: Tensor, spec: ConvolvedHeadsSpec, hidden: int, width: int) -> Tensor:
    """``SeparableConv1D``: along the tokens, across the channels, and a bias added in place."""
    positions = x.numel // hidden
    bias = t.parameter("self_attn.key_conv.bias", width, 1, module="self_attn.key_conv")
    name = "self_attn.key_conv.depthwise.weight"
    along = convolve(t, x, t.parameter(name, hidden, 1, spec.kernel), None, positions, hidden)
    name = "self_attn.key_conv.pointwise.weight"
    across = convolve(t, along, t.parameter(name, width, hidden, 1), None, positions, width)
    out = t.view(across, across.numel)
    t.record(
        OperationKind.ADD_IN_PLACE, (across, bias), (out,),
        gradients=(Gradient.ALIAS, Gradient.SUMMED),
    )  # fmt: skip
    return out


def _kernels(t: Tape, mixed: Tensor, spec: ConvolvedHeadsSpec, width: int) -> Tensor:
    """A kernel for each head of each token, whose numbers sum up to one."""
    size = spec.scores.num_heads * spec.kernel
    rows = t.contiguous(mixed)
    product = linear(t, rows, "self_attn.conv_kernel", width, size)
    bias = t.parameter("self_attn.conv_kernel.bias", size)
    return softmax(t, t.add(product, t.cast_weight(bias)))


def _spans(
    t: Tape, x: Tensor, kernels: Tensor, spec: ConvolvedHeadsSpec, hidden: int, width: int
) -> Tensor:
    """Each token's neighbours side by side (``unfold``), times its kernels."""
    values = linear(t, x, "self_attn.conv_out", hidden, width, bias=True)
    turned = t.scale(values, OperationKind.CLONE)
    unfolded = t.tensor(turned.numel * spec.kernel, turned.dtype)
    t.record(OperationKind.IM2COL, (turned,), (unfolded,), gradients=(Gradient.FRESH,))
    spans = t.contiguous(unfolded)
    product = batched_matmul(t, spans, kernels, values.numel, spec.kernel)
    out = t.view(product, product.numel)
    t.record(OperationKind.VIEW, (product,), (out,), gradients=(Gradient.FRESH,))
    return out


def _attended(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, context: StackContext
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The values that the scores weight, and what the function's variables hold."""
    left, right = merged_heads(t, query, shape), merged_heads(t, key, shape)
    scores = batched_matmul(t, left, right, shape.scores, shape.spec.head_dim)
    scores = t.scale(scores, OperationKind.DIV)
    if context.mask is not None:
        scores = t.add(scores, context.mask)
    weights = dropout(t, softmax(t, scores), shape.spec.dropout)
    product = batched_matmul(t, weights, merged_heads(t, value, shape), shape.outputs, shape.keys)
    out = t.contiguous(product) if shape.batch == 1 else t.scale(product, OperationKind.CLONE)
    return out, (scores, weights)


def grouped_network(t: Tape, x: Tensor, spec: GroupedNetworkSpec, context: StackContext) -> Tensor:
    """Two linear layers whose channels are in groups, around a nonlinearity."""
    hidden, inner = context.hidden_size, spec.intermediate_size
    up = _grouped(t, x, "mlp.up_proj", hidden, inner, spec.groups)
    middle = activation_module(t, up, spec.activation, "mlp.act_fn")
    t.touch(up)
    out = _grouped(t, middle, "mlp.down_proj", inner, hidden, spec.groups)
    t.touch(middle)
    return out


def _grouped(t: Tape, x: Tensor, name: str, inputs: int, outputs: int, groups: int) -> Tensor:
    """``GroupedLinearLayer``: a batched product, turned back by a copy, and a bias."""
    weight = t.parameter(f"{name}.weight", groups, inputs // groups, outputs // groups)
    bias = t.parameter(f"{name}.bias", outputs)
    rows = x.numel // inputs
    product = batched_matmul(t, x, t.cast_weight(weight), rows * outputs, inputs // groups)
    turned = product
    if rows > 1:
        turned = t.scale(product, OperationKind.CLONE)
    return t.add(turned, bias)
