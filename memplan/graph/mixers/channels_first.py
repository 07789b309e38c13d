"""SqueezeBERT's layer: every linear layer is a grouped convolution of length 1 over the channels.

transformers 5.23, models/squeezebert/modeling_squeezebert.py. Tokens lie behind one another in each
channel, so that heads are views of what the convolutions give; norms see them turned.
"""

from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.convolutions import convolve
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.mixers import ChannelsFirstNetworkSpec, ChannelsFirstSpec


def channels_first_attention(
    t: Tape, x: Tensor, spec: ChannelsFirstSpec, context: StackContext
) -> Tensor:
    """Scores of heads that are views, the values, and the convolution behind them."""
    hidden = context.hidden_size
    query, key, value = (
        _pointwise(t, x, f"self_attn.{name}_proj", hidden, hidden, groups)
        for name, groups in zip("qkv", spec.groups, strict=True)
    )
    pairs = context.batch * spec.num_heads * context.seq_len**2
    scores = batched_matmul(t, _turned(t, query), key, pairs, hidden // spec.num_heads)
    scores = t.scale(scores, OperationKind.DIV)
    if context.mask is not None:
        scores = t.add(scores, context.mask)
    weights = dropout(t, softmax(t, scores), spec.dropout)
    product = batched_matmul(t, weights, _turned(t, value), x.numel, context.seq_len)
    out = t.scale(product, OperationKind.CLONE)
    t.touch(query, key, value, scores, weights)
    result = _pointwise(t, out, "self_attn.o_proj", hidden, hidden, spec.output_groups)
    t.touch(out)
    return result


def channels_first_network(
    t: Tape, x: Tensor, spec: ChannelsFirstNetworkSpec, context: StackContext
) -> Tensor:
    """Two convolutions around a nonlinearity."""
    hidden, inner = context.hidden_size, spec.intermediate_size
    up = _pointwise(t, x, "mlp.up_proj", hidden, inner, spec.up_groups)
    middle = activation_module(t, up, spec.activation, "mlp.act_fn")
    t.touch(up)
    out = _pointwise(t, middle, "mlp.down_proj", inner, hidden, spec.down_groups)
    t.touch(middle)
    return out


def _pointwise(t: Tape, x: Tensor, name: str, inputs: int, outputs: int, groups: int) -> Tensor:
    weight = t.parameter(f"{name}.weight", outputs, inputs // groups, 1)
    bias = t.parameter(f"{name}.bias", outputs)
    return convolve(t, x, weight, bias, x.numel // inputs, outputs)


def _turned(t: Tape, x: Tensor) -> Tensor:
    """Heads with the tokens first: a view, whose gradient is copied back."""
    out = t.view(x, x.numel)
    t.record(OperationKind.TRANSPOSE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out
