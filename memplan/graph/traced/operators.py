"""What torch's functions are on the tape: one row for each name that a program may call.

A row is given the player and the step and returns the tensors that the call makes. What an operation keeps
and how its gradients come is written in ``memplan.graph.tape`` and ``operations``, for built-in models too.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.paths import sdpa
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations import (
    activation,
    cross_entropy,
    drop,
    dropout_probability,
    embedding_lookup,
    matmul_weight,
    softmax,
)
from memplan.graph.segments import Gradient
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole
from memplan.model.traced import Step

if TYPE_CHECKING:
    from memplan.graph.traced.play import Player

Operator = Callable[["Player", Step], list[Tensor]]


def _view(p: "Player", step: Step) -> list[Tensor]:
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


def _getitem(p: "Player", step: Step) -> list[Tensor]:
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


def _split(p: "Player", step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    return p.t.split(x, *map(p.numel, step.outputs))


def _to(p: "Player", step: Step) -> list[Tensor]:
    number, made = step.inputs[0], step.outputs[0]
    x = p.tensor(number)
    if p.value(made).format == p.value(number).format:
        return [x]
    return [p.t.cast(x, p.dtype(made))]


def _linear(p: "Player", step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    weight = p.parameter(step.inputs[1], WeightRole.MATRIX)
    bias = p.parameter(step.inputs[2], WeightRole.OTHER) if len(step.inputs) > 2 else None
    return [matmul_weight(p.t, x, weight, bias)]


def _addmm(p: "Player", step: Step) -> list[Tensor]:
    """``transformers.pytorch_utils.Conv1D``: bias, rows, a weight whose columns are the outputs."""
    bias, x, weight = step.inputs
    matrix = p.parameter(weight, WeightRole.MATRIX, is_turned=True)
    return [matmul_weight(p.t, p.tensor(x), matrix, p.parameter(bias, WeightRole.OTHER))]


def _embedding(p: "Player", step: Step) -> list[Tensor]:
    table = p.parameter(step.inputs[1], WeightRole.TABLE)
    ids = p.tensor(step.inputs[0])
    given = None if p.value(step.inputs[0]).input or p.is_of_inputs(step.inputs[0]) else ids
    return [embedding_lookup(p.t, table, p.numel(step.inputs[0]), given)]


def _layer_norm(p: "Player", step: Step) -> list[Tensor]:
    from memplan.graph.operations import _native_layer_norm

    x = p.tensor(step.inputs[0])
    weights = tuple(p.parameter(each, WeightRole.NORM) for each in step.inputs[1:])
    return [_native_layer_norm(p.t, x, p.shape(step.inputs[0])[-1], weights)]


def _mean(p: "Player", step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    return [p.t.mean(x, p.numel(step.inputs[0]) // p.numel(step.outputs[0]))]


def _pow(p: "Player", step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    return [p.t.square(x if p.t.autocast is None else p.t.cast(x, DType.FP32))]


def _rsqrt(p: "Player", step: Step) -> list[Tensor]:
    return [p.t.elementwise(OperationKind.RSQRT, p.tensor(step.inputs[0]), saves_output=True)]


def _tanh(p: "Player", step: Step) -> list[Tensor]:
    return [p.t.elementwise(OperationKind.TANH, p.tensor(step.inputs[0]), saves_output=True)]


def _without_memory(kind: OperationKind) -> Operator:
    def made(p: "Player", step: Step) -> list[Tensor]:
        return [p.t.elementwise(kind, p.tensor(step.inputs[0]))]

    return made


def _add(p: "Player", step: Step) -> list[Tensor]:
    if len(step.inputs) == 1:
        return [p.t.shift(p.tensor(step.inputs[0]))]
    return [p.t.add(*map(p.tensor, step.inputs))]


def _mul(p: "Player", step: Step) -> list[Tensor]:
    if len(step.inputs) == 1:
        return [p.t.scale(p.tensor(step.inputs[0]))]
    return [p.t.mul(*map(p.tensor, step.inputs))]


def _neg(p: "Player", step: Step) -> list[Tensor]:
    return [p.t.scale(p.tensor(step.inputs[0]), OperationKind.NEG)]


def _cat(p: "Player", step: Step) -> list[Tensor]:
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

    def made(p: "Player", step: Step) -> list[Tensor]:
        if not p.numel(step.outputs[0]):
            return [p.t.view(p.t.tensor(1, p.dtype(step.outputs[0])), 0)]
        out = p.t.tensor(p.numel(step.outputs[0]), p.dtype(step.outputs[0]))
        p.t.record(kind, tuple(p.tensor(each) for each in step.inputs), (out,))
        return [out]

    return made


def _softmax(p: "Player", step: Step) -> list[Tensor]:
    wanted = step.setting("dtype")
    target = p.dtype(step.outputs[0]) if wanted is not None else None
    return [softmax(p.t, p.tensor(step.inputs[0]), dtype=target)]


def _dropout(p: "Player", step: Step) -> list[Tensor]:
    x = p.tensor(step.inputs[0])
    share = step.setting("p", step.setting("1", 0.5))
    is_training = step.setting("training", step.setting("2", True))
    assert isinstance(share, int | float)
    if not is_training or dropout_probability(p.t, float(share)) == 0.0:
        return [x]
    return [drop(p.t, x)]


def _activation(kind: Activation) -> Operator:
    def made(p: "Player", step: Step) -> list[Tensor]:
        return [activation(p.t, p.tensor(step.inputs[0]), kind)]

    return made


def _attention(p: "Player", step: Step) -> list[Tensor]:
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


def _cross_entropy(p: "Player", step: Step) -> list[Tensor]:
    return [cross_entropy(p.t, p.tensor(step.inputs[0]), p.tensor(step.inputs[1]))]


def _where(p: "Player", step: Step) -> list[Tensor]:
    """Chosen by a condition, which is kept; of numbers there is no gradient."""
    condition, *chosen = map(p.tensor, step.inputs)
    out = p.t.tensor(p.numel(step.outputs[0]), p.dtype(step.outputs[0]))
    gradients = (Gradient.FRESH if each.requires_grad else Gradient.NONE for each in chosen)
    p.t.record(
        OperationKind.WHERE, (condition, *chosen), (out,), saves=(condition,),
        gradients=(Gradient.NONE, *gradients),
    )  # fmt: skip
    return [out]


def _contiguous(p: "Player", step: Step) -> list[Tensor]:
    if step.inputs[0] == step.outputs[0]:
        return [p.tensor(step.inputs[0])]
    return [p.t.contiguous(p.tensor(step.inputs[0]))]


def without_gradient(p: "Player", step: Step) -> list[Tensor]:
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
    "torch.rsqrt": _rsqrt, "torch.Tensor.rsqrt": _rsqrt, "torch.tanh": _tanh, "torch.Tensor.tanh": _tanh,
    "torch.Tensor.add": _add, "torch.add": _add, "torch.Tensor.sub": _add,
    "torch.Tensor.mul": _mul, "torch.mul": _mul, "torch.Tensor.div": _mul,
    "torch.Tensor.neg": _neg, "torch.neg": _neg, "torch.cat": _cat,
    "torch.arange": _made(OperationKind.ARANGE), "torch.tensor": _made(OperationKind.EMPTY),
    "torch.Tensor.cos": _made(OperationKind.COS), "torch.Tensor.sin": _made(OperationKind.SIN),
    "torch.nn.functional.pad": _made(OperationKind.PAD),
    "torch.nn.functional.softmax": _softmax, "torch.nn.functional.dropout": _dropout,
    "torch.nn.functional.silu": _activation(Activation.SILU),
    "torch.nn.functional.relu": _activation(Activation.RELU),
    "torch.nn.functional.gelu": _activation(Activation.GELU),
    "torch.where": _where, "torch.Tensor.where": _where,
    "torch.nn.functional.scaled_dot_product_attention": _attention,
    "torch.nn.functional.cross_entropy": _cross_entropy,
}  # fmt: skip
"""By torch's name for the function."""
