"""Feed-forward networks: up, activation, and down again."""

from collections.abc import Callable

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.splits import Sharing
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.products import linear
from memplan.model.networks import Activation, FeedForwardSpec, NetworkPlace
from memplan.training.choices_of_kernels.kernels import FeedForwardKernel


def feed_forward(
    t: Tape,
    x: Tensor,
    spec: FeedForwardSpec,
    hidden_size: int,
    name: str = "mlp",
    *,
    sharing: Sharing | None = None,
) -> Tensor:
    """Up, activation (times the gate), down; ``sharing`` says how ranks share what is no layer's own."""
    inner = spec.intermediate_size
    sharing = sharing or t.options.split_plan.network
    if spec.gated:
        middle = _gated(t, x, spec, hidden_size, name, sharing)
    else:
        columns = sharing.columns
        up = linear(t, x, f"{name}.up_proj", hidden_size, inner, bias=spec.bias, split=columns)
        middle = _activated(t, up, spec.activation, name)
        t.touch(up)
        if spec.place is NetworkPlace.NESTED:
            t.touch(x)
    if spec.place is not NetworkPlace.MODULE:
        t.segment.unmade.add(name)
    inside = f"{name}.dropout_inside" if spec.dropout_module else ""
    middle = dropout(t, middle, spec.activation_dropout, module=inside)
    out = linear(
        t, middle, f"{name}.down_proj", inner, hidden_size, bias=spec.bias, split=sharing.rows
    )
    if spec.scaled:
        t.touch(middle)
        out = t.scale(out)
    if spec.place is NetworkPlace.MODULE:
        t.touch(x)
    return out


def _activated(t: Tape, x: Tensor, kind: Activation, name: str) -> Tensor:
    return activation_module(t, x, kind, f"{name}.act_fn")


def _gated(
    t: Tape, x: Tensor, spec: FeedForwardSpec, hidden_size: int, name: str, sharing: Sharing
) -> Tensor:
    """The gated product."""
    inner = spec.intermediate_size

    def column(part: str, width: int) -> Tensor:
        return linear(
            t, x, f"{name}.{part}", hidden_size, width, bias=spec.bias, split=sharing.columns
        )

    gate = x if spec.scaled else column("gate_proj", inner)
    if t.kernels.feed_forward is FeedForwardKernel.FUSED:
        return fused_gate(t, gate, column("up_proj", inner))
    if spec.clamped:
        return clamped_product(t, gate, column, spec, name)
    given, up = gate, None
    if spec.scaled:
        up = column("up_proj", inner)
        given = t.scale(column("gate_proj", inner))
    active = activation_module(t, given, spec.activation, f"{name}.act_fn")
    return t.mul(active, up or column("up_proj", inner))


def clamped_product(
    t: Tape,
    gate: Tensor,
    up: Tensor | Callable[[str, int], Tensor],
    spec: FeedForwardSpec,
    name: str,
) -> Tensor:
    """Gate and up, each clamped, the gate before its nonlinearity; up may be still to make."""
    narrowed = t.elementwise(OperationKind.CLAMP, gate)
    made = up if isinstance(up, Tensor) else up("up_proj", spec.intermediate_size)
    other = t.elementwise(OperationKind.CLAMP, made)
    return t.mul(activation_module(t, narrowed, spec.activation, f"{name}.act_fn"), other)


def fused_gate(t: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """Liger's ``silu(gate) * up``: keeps gate and up, and writes their gradients over them.

    Halves of one tensor are copied first, to lie row after row (liger_kernel/ops/swiglu.py,
    ``LigerSiLUMulFunction``; ops/utils.py, ``ensure_contiguous``).
    """
    kept = [gate, up]
    if gate.storage is up.storage:
        kept = [t.tensor(each.numel, each.dtype) for each in kept]
    out = t.tensor(gate.numel, gate.dtype)
    made = [each for each in kept if each not in (gate, up)]
    t.record(
        OperationKind.FUSED_GATE, (gate, up), (*made, out), saves=kept,
        gradients=(Gradient.SAVED, Gradient.SAVED), in_python=True,
    )  # fmt: skip
    return out
