"""What torch's functions are on the tape: one row for each name that a program may call.

A row is given the player and the step and returns the tensors that the call makes. What an operation keeps
and how its gradients come is written in ``memplan.graph.core.tape`` and ``operations``, for built-in models too.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul
from memplan.graph.attention.paths import sdpa
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import drop, dropout_probability, softmax
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import native_layer_norm, rms_norm_fused
from memplan.graph.operations.products import matmul_weight
from memplan.graph.traced.values import Values
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole
from memplan.model.traced import Step

Operator = Callable[[Values, Step], list[Tensor]]


def _view(p: Values, step: Step) -> list[Tensor]:
    """A view of the whole: the gradient goes through as a view, or is copied into rows."""
    number, made = step.inputs[0], step.outputs[0]
    x = p.tensor(number)
    if number == made:
        return [x]
    if p.value(number).storage != p.value(made).storage:
        return [p.t.contiguous(x)]
    if p.is_sliced_behind(made):
        out = p.t.view(x, x.numel)
        p.t.record(OperationKind.VIEW, (x,), (out,), gradients=(Gradient.FRESH,))
        return [out]
    if p.numel(made) != p.numel(number):
        out = p.t.view(x, p.numel(made))
        p.t.record(OperationKind.EXPAND, (x,), (out,), gradients=(Gradient.FRESH,))
        return [out]
    # A gradient finds its way by the tensor: a view that changes nothing is the tensor itself.
    return [x]


def _getitem(p: Values, step: Step) -> list[Tensor]:
    x, made = p.tensor(step.inputs[0]), step.outputs[0]
    if len(step.inputs) > 1:
        rows = p.t.tensor(p.numel(made), x.dtype)
        p.t.record(
            OperationKind.INDEX, (x, *map(p.tensor, step.inputs[1:])), (rows,),
            saves=tuple(map(p.tensor, step.inputs[1:])), gradients=(Gradient.FRESH,),
        )  # fmt: skip
        return [rows]
    if p.numel(made) == p.numel(step.inputs[0]):
        return [x]
    return [p.t.slice(x, p.numel(made))]


def _split(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    return p.t.split(x, *map(p.numel, step.outputs))


def _to(p: Values, step: Step) -> list[Tensor]:
    number, made = step.inputs[0], step.outputs[0]
    x = p.tensor(number)
    if p.value(made).format == p.value(number).format:
        return [x]
    return [p.t.cast(x, p.dtype(made))]


def _linear(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    weight = p.parameter(step.inputs[1], WeightRole.MATRIX)
    bias = p.parameter(step.inputs[2], WeightRole.OTHER) if len(step.inputs) > 2 else None
    return [matmul_weight(p.t, x, weight, bias)]


def _addmm(p: Values, step: Step) -> list[Tensor]:
    """``transformers.pytorch_utils.Conv1D``: bias, rows, a weight whose columns are the outputs."""
    bias, x, weight = step.inputs
    matrix = p.parameter(weight, WeightRole.MATRIX, is_turned=True)
    return [matmul_weight(p.t, p.tensor(x), matrix, p.parameter(bias, WeightRole.OTHER))]


def _embedding(p: Values, step: Step) -> list[Tensor]:
    table = p.parameter(step.inputs[1], WeightRole.TABLE)
    ids = p.tensor(step.inputs[0])
    given = None if p.value(step.inputs[0]).input or p.is_of_inputs(step.inputs[0]) else ids
    return [embedding_lookup(p.t, table, p.numel(step.inputs[0]), given)]


def _layer_norm(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    weights = tuple(p.parameter(each, WeightRole.NORM) for each in step.inputs[1:])
    return [native_layer_norm(p.t, x, p.shape(step.inputs[0])[-1], weights)]


def _rms_norm(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    return [rms_norm_fused(p.t, x, p.parameter(step.inputs[1], WeightRole.NORM))]


def _matmul(p: Values, step: Step) -> list[Tensor]:
    """A product with a weight whose columns are the outputs, or of two tensors of a batch."""
    left, right = step.inputs
    if p.value(right).parameter and len(p.shape(right)) == 2:
        weight = p.parameter(right, WeightRole.MATRIX, is_turned=True)
        return [matmul_weight(p.t, p.tensor(left), weight)]
    factors = p.tensor(left), p.tensor(right)
    return [batched_matmul(p.t, *factors, p.numel(step.outputs[0]), p.shape(left)[-1])]


def _sum(p: Values, step: Step) -> list[Tensor]:
    """A sum, whose gradient is a view of the sum's; fp32 under autocast."""
    x = p.tensor(step.inputs[0])
    x = x if p.t.autocast is None else p.t.cast(x, DType.FP32)
    out = p.t.tensor(p.numel(step.outputs[0]), x.dtype)
    p.t.record(OperationKind.SUM, (x,), (out,), gradients=(Gradient.FRESH,))
    return [out]


def _mean(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    return [p.t.mean(x, p.numel(step.inputs[0]) // p.numel(step.outputs[0]))]


def _pow(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    return [p.t.square(x if p.t.autocast is None else p.t.cast(x, DType.FP32))]


def _rsqrt(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    x = x if p.t.autocast is None else p.t.cast(x, DType.FP32)
    return [p.t.elementwise(OperationKind.RSQRT, x)]


def _function(kind: OperationKind, *, is_widened: bool = False) -> Operator:
    """A function of each element, by its row of the table."""

    def made(p: Values, step: Step) -> list[Tensor]:
        x = p.tensor(step.inputs[0])
        if is_widened and p.t.autocast is not None:
            x = p.t.cast(x, DType.FP32)
        return [p.t.elementwise(kind, x)]

    return made


def _masked_fill(p: Values, step: Step) -> list[Tensor]:
    """Where the mask is true a number stands; the mask is kept."""
    x, mask = map(p.tensor, step.inputs[:2])
    out = p.t.tensor(p.numel(step.outputs[0]), x.dtype)
    p.t.record(
        OperationKind.MASKED_FILL, (x, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return [out]


def _add(p: Values, step: Step) -> list[Tensor]:
    if len(step.inputs) == 1:
        return [p.t.shift(p.tensor(step.inputs[0]))]
    return [p.t.add(*map(p.tensor, step.inputs))]


def _mul(p: Values, step: Step) -> list[Tensor]:
    if len(step.inputs) == 1:
        return [p.t.scale(p.tensor(step.inputs[0]))]
    return [p.t.mul(*map(p.tensor, step.inputs))]


def _div(p: Values, step: Step) -> list[Tensor]:
    """By a number nothing is kept; by a tensor both are."""
    if len(step.inputs) == 1:
        return [p.t.scale(p.tensor(step.inputs[0]), OperationKind.DIV)]
    left, right = map(p.tensor, step.inputs)
    out = p.t.tensor(p.numel(step.outputs[0]), p.dtype(step.outputs[0]))
    p.t.record(
        OperationKind.DIV, (left, right), (out,), saves=(left, right) if right.requires_grad else (right,),
        gradients=(Gradient.FRESH, 3 * out.storage.num_bytes),
    )  # fmt: skip
    return [out]


def _neg(p: Values, step: Step) -> list[Tensor]:
    return [p.t.scale(p.tensor(step.inputs[0]), OperationKind.NEG)]


def _cat(p: Values, step: Step) -> list[Tensor]:
    """Parts without elements are no parts: a cache that is empty."""
    parts = [p.tensor(each) for each in step.inputs if p.numel(each)]
    if len(parts) == 1 and len(step.inputs) > 1:
        x = parts[0]
        joined = p.t.tensor(x.numel, x.dtype)
        p.t.record(OperationKind.CAT, (x,), (joined,), gradients=(Gradient.ALIAS,))
        joined.by_head = True
        return [joined]
    return [p.t.concatenate(*parts)]


def _made(kind: OperationKind) -> Operator:
    """Something that is computed from no activation."""

    def made(p: Values, step: Step) -> list[Tensor]:
        if not p.numel(step.outputs[0]):
            return [p.t.view(p.t.tensor(1, p.dtype(step.outputs[0])), 0)]
        out = p.t.tensor(p.numel(step.outputs[0]), p.dtype(step.outputs[0]))
        p.t.record(kind, tuple(p.tensor(each) for each in step.inputs), (out,))
        return [out]

    return made


def _softmax(p: Values, step: Step) -> list[Tensor]:
    wanted = step.setting("dtype")
    target = p.dtype(step.outputs[0]) if wanted is not None else None
    return [softmax(p.t, p.tensor(step.inputs[0]), dtype=target)]


def _dropout(p: Values, step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    share = step.setting("p", step.setting("1", 0.5))
    is_training = step.setting("training", step.setting("2", True))
    assert isinstance(share, int | float)
    if not is_training or dropout_probability(p.t, float(share)) == 0.0:
        return [x]
    return [drop(p.t, x)]


def _activation(kind: Activation) -> Operator:
    def made(p: Values, step: Step) -> list[Tensor]:
        return [activation(p.t, p.tensor(step.inputs[0]), kind)]

    return made


def _attention(p: Values, step: Step) -> list[Tensor]:
    query, key, value = step.inputs[:3]
    mask = p.tensor(step.inputs[3]) if len(step.inputs) > 3 else None
    batch, heads, rows, width = p.shape(query)
    _, kv_heads, keys, _ = p.shape(key)
    share = step.setting("dropout_p", 0.0)
    assert isinstance(share, int | float)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width,
        value_head_dim=p.shape(value)[-1] if p.shape(value)[-1] != width else None,
        causal=bool(step.setting("is_causal", False)), dropout=float(share),
    )  # fmt: skip
    shape = Shape(batch, rows, keys, spec)
    tensors = (p.tensor(query), p.tensor(key), p.tensor(value))
    return [sdpa(p.t, *tensors, shape, mask, grouped=kv_heads < heads)]


def _cross_entropy(p: Values, step: Step) -> list[Tensor]:
    return [cross_entropy(p.t, p.tensor(step.inputs[0]), p.tensor(step.inputs[1]))]


def _same(p: Values, step: Step) -> list[Tensor]:
    return [p.tensor(step.inputs[0])]


def _leaf(p: Values, step: Step) -> list[Tensor]:
    """A gradient is asked of a tensor that was made from none."""
    x = p.tensor(step.inputs[0])
    if not x.requires_grad and x.storage.segment >= 0 and p.makes_itself(step.inputs[0]):
        p.t.leaf(x)
    return [x]


def _where(p: Values, step: Step) -> list[Tensor]:
    """Chosen by a condition, which is kept; of numbers there is no gradient."""
    condition, *chosen = map(p.tensor, step.inputs)
    out = p.t.tensor(p.numel(step.outputs[0]), p.dtype(step.outputs[0]))
    gradients = (Gradient.FRESH if each.requires_grad else Gradient.NONE for each in chosen)
    p.t.record(
        OperationKind.WHERE, (condition, *chosen), (out,), saves=(condition,),
        gradients=(Gradient.NONE, *gradients),
    )  # fmt: skip
    return [out]


def _contiguous(p: Values, step: Step) -> list[Tensor]:
    if step.inputs[0] == step.outputs[0]:
        return [p.tensor(step.inputs[0])]
    return [p.t.contiguous(p.tensor(step.inputs[0]))]


def without_gradient(p: Values, step: Step) -> list[Tensor]:
    """Any call on tensors that no gradient reaches: what it makes is there, and nothing is kept."""
    found = []
    for number in step.outputs:
        source = next((each for each in step.inputs if p.shares_storage(each, number)), None)
        if source is not None:
            found.append(p.t.view(p.tensor(source), p.numel(number)))
            continue
        out = p.t.tensor(p.numel(number), p.dtype(number))
        p.t.record(OperationKind.GIVEN, tuple(map(p.tensor, step.inputs)), (out,))
        found.append(out)
    return found


_TANH = _function(OperationKind.TANH)
_SIGMOID = _function(OperationKind.SIGMOID)
_EXP = _function(OperationKind.EXP, is_widened=True)
_SQRT = _function(OperationKind.SQRT)

OPERATORS: dict[str, Operator] = {
    "torch.Tensor.view": _view, "torch.Tensor.reshape": _view, "torch.Tensor.transpose": _view,
    "torch.Tensor.permute": _view, "torch.Tensor.unsqueeze": _view, "torch.Tensor.squeeze": _view,
    "torch.Tensor.flatten": _view, "torch.Tensor.expand": _view, "torch.Tensor.t": _view,
    "torch.Tensor.contiguous": _contiguous, "torch.Tensor.__getitem__": _getitem,
    "torch.Tensor.split": _split, "torch.Tensor.chunk": _split,
    "torch.Tensor.to": _to, "torch.Tensor.float": _to, "torch.Tensor.type_as": _to,
    "torch.nn.functional.linear": _linear, "torch.addmm": _addmm,
    "torch.nn.functional.embedding": _embedding,
    "torch.nn.functional.layer_norm": _layer_norm,
    "torch.Tensor.pow": _pow, "torch.pow": _pow, "torch.Tensor.mean": _mean, "torch.mean": _mean,
    "torch.rsqrt": _rsqrt, "torch.Tensor.rsqrt": _rsqrt,
    "torch.tanh": _TANH, "torch.Tensor.tanh": _TANH, "torch.nn.functional.tanh": _TANH,
    "torch.sigmoid": _SIGMOID, "torch.Tensor.sigmoid": _SIGMOID, "torch.nn.functional.sigmoid": _SIGMOID,
    "torch.exp": _EXP, "torch.Tensor.exp": _EXP, "torch.sqrt": _SQRT, "torch.Tensor.sqrt": _SQRT,
    "torch.sum": _sum, "torch.Tensor.sum": _sum,
    "torch.matmul": _matmul, "torch.Tensor.matmul": _matmul, "torch.Tensor.__matmul__": _matmul,
    "torch.bmm": _matmul, "torch.Tensor.bmm": _matmul,
    "torch.Tensor.masked_fill": _masked_fill, "torch.masked_fill": _masked_fill,
    "torch.nn.functional.rms_norm": _rms_norm, "torch.rms_norm": _rms_norm,
    "torch.Tensor.add": _add, "torch.add": _add, "torch.Tensor.sub": _add, "torch.sub": _add,
    "torch.Tensor.__add__": _add, "torch.Tensor.__radd__": _add, "torch.Tensor.__sub__": _add,
    "torch.Tensor.__mul__": _mul, "torch.Tensor.__rmul__": _mul, "torch.Tensor.__truediv__": _div,
    "torch.div": _div,
    "torch.Tensor.mul": _mul, "torch.mul": _mul, "torch.Tensor.div": _div,
    "torch.Tensor.neg": _neg, "torch.neg": _neg, "torch.cat": _cat, "torch.stack": _cat, "torch.concat": _cat,
    "torch.arange": _made(OperationKind.ARANGE), "torch.tensor": _made(OperationKind.EMPTY),
    "torch.Tensor.cos": _made(OperationKind.COS), "torch.Tensor.sin": _made(OperationKind.SIN),
    "torch.nn.functional.pad": _made(OperationKind.PAD),
    "torch.nn.functional.softmax": _softmax, "torch.nn.functional.dropout": _dropout,
    "torch.nn.functional.silu": _activation(Activation.SILU),
    "torch.nn.functional.relu": _activation(Activation.RELU),
    "torch.nn.functional.gelu": _activation(Activation.GELU),
    "torch.Tensor.requires_grad_": _leaf, "torch.Tensor.detach": _same,
    "torch.where": _where, "torch.Tensor.where": _where,
    "torch.nn.functional.scaled_dot_product_attention": _attention,
    "torch.nn.functional.cross_entropy": _cross_entropy,
}  # fmt: skip
"""By torch's name for the function."""
