"""Gates on attention's output: a linear layer of the hidden states, a curve, a product."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.model.attention import AttentionSpec
from memplan.model.parameters import WeightRole


def gated_projections(
    t: Tape, x: Tensor, spec: AttentionSpec, hidden_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the gate, which lies beside the queries head by head.

    Each is normalized before the next is made (``Qwen3NextAttention``).
    """
    width, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    both = linear(
        t,
        x,
        "self_attn.q_proj",
        hidden_size,
        2 * width,
        bias=spec.query_bias,
        role=WeightRole.QUERY_KEY,
    )
    query, gate = t.split(both, both.numel // 2, both.numel // 2)
    gate = t.contiguous(gate)
    key_norm = spec.query_key_norm
    if key_norm is not None:
        query = norm(t, query, key_norm, "self_attn.q_norm", spec.head_dim)
    key = linear(
        t, x, "self_attn.k_proj", hidden_size, narrow, bias=spec.key_bias, role=WeightRole.QUERY_KEY
    )
    if key_norm is not None:
        key = norm(t, key, key_norm, "self_attn.k_norm", spec.head_dim)
    value = linear(t, x, "self_attn.v_proj", hidden_size, narrow, bias=spec.value_bias)
    return query, key, value, gate


def gated_output(
    t: Tape, x: Tensor, out: Tensor, states: Tensor | None, spec: AttentionSpec, hidden_size: int
) -> Tensor:
    """Attention's output times the sigmoid of its gate, which may be still to make (Muse Glimmer)."""
    made = states
    if made is None:
        width = spec.num_heads * spec.head_dim
        made = linear(t, x, "self_attn.gate_proj", hidden_size, width)
    return t.mul(out, t.elementwise(OperationKind.SIGMOID, made))
