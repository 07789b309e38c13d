"""Gates on attention's output: a linear layer of the hidden states, a curve, a product."""

from memplan.dtypes import DType
from memplan.graph.operations import linear
from memplan.graph.tape import Tape, Tensor
from memplan.model.spec import AttentionSpec, OutputGate


def gate_states(t: Tape, x: Tensor, spec: AttentionSpec, hidden_size: int) -> Tensor:
    """The gate's linear layer, one number for each output or for each head."""
    width = spec.num_heads
    if spec.output_gate is not OutputGate.SOFTPLUS_PER_HEAD:
        width *= spec.head_dim
    return linear(t, x, "self_attn.gate_proj", hidden_size, width)


def split_gate(t: Tape, both: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and gate, head by head in one tensor; the gate is copied out."""
    query, gate = t.split(both, both.numel // 2, both.numel // 2)
    return query, t.contiguous(gate)


def gated_output(
    t: Tape, x: Tensor, out: Tensor, states: Tensor | None, spec: AttentionSpec, hidden_size: int
) -> Tensor:
    """Attention's output times its gate (``AfmoeAttention``, ``LagunaAttention``)."""
    if states is not None:
        return t.mul(out, t.elementwise("sigmoid", states, saves_output=True))
    full = t.cast(gate_states(t, x, spec, hidden_size), DType.FP32)
    curve = t.elementwise("softplus", full, saves_input=True)
    return t.mul(out, t.cast(curve, out.dtype))
