"""Feed-forward networks: up, activation, and down again."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.splits import Sharing
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.products import linear
from memplan.model.networks import Activation, FeedForwardSpec
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
    inside = f"{name}.dropout_inside" if spec.dropout_module else ""
    middle = dropout(t, middle, spec.activation_dropout, module=inside)
    out = linear(
        t, middle, f"{name}.down_proj", inner, hidden_size, bias=spec.bias, split=sharing.rows
    )
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

    gate = column("gate_proj", inner)
    if t.kernels.feed_forward is FeedForwardKernel.FUSED:
        return fused_gate(t, gate, column("up_proj", inner))
    active = activation_module(t, gate, spec.activation, f"{name}.act_fn")
    return t.mul(active, column("up_proj", inner))


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
