"""XLNet's attention: scores of contents and of relative positions (``XLNetRelativeAttention``).

transformers 5.23, models/xlnet/modeling_xlnet.py. Tokens come before sequences, so that heads are views; the
projections are weights of three dimensions, multiplied by ``torch.einsum``.
"""

from memplan.dtypes import DType
from memplan.graph.contraction import Turned, contraction
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import drop, dropout, dropout_probability, softmax
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.attention import RelativeSpec
from memplan.model.parameters import WeightRole


def share_positions(t: Tape, spec: RelativeSpec, context: StackContext) -> None:
    """Sines of all distances, for every sequence, dropped out without a gradient; the stack holds them."""
    numel = 2 * context.seq_len * context.hidden_size
    angles = t.tensor(numel // 2, DType.FP32)
    t.record(OperationKind.MUL, (), (angles,))
    table = t.tensor(numel, DType.FP32)
    t.record(OperationKind.CAT, (angles,), (table,), forward_scratch_bytes=table.storage.num_bytes)
    found = table
    if dropout_probability(t, spec.dropout) > 0:
        longer = t.view(table, numel * context.batch)
        found = drop(t, longer)
    t.hold(found)
    context.bias = found


def relative_attention(t: Tape, x: Tensor, spec: RelativeSpec, context: StackContext) -> Tensor:
    """Heads of contents and positions, both scores, the weighted values, the output projection."""
    hidden, size = context.hidden_size, spec.num_heads * spec.head_dim
    weights = {name: _weight(t, name, hidden, spec) for name in ("q", "k", "v", "o", "r")}
    biases = {
        name: t.parameter(f"self_attn.{name}", spec.num_heads, spec.head_dim, module="self_attn")
        for name in ("r_r_bias", "r_s_bias", "r_w_bias")
    }
    biases["r_s_bias"].unused = True
    t.parameter(
        "self_attn.seg_embed", 2, spec.num_heads, spec.head_dim, module="self_attn"
    ).unused = True
    query, key, value = (_projected(t, x, weights[name], size) for name in "qkv")
    positions = context.bias
    assert positions is not None
    places = _projected(t, t.cast(positions, x.dtype), weights["r"], size)
    pairs = context.batch * spec.num_heads * context.seq_len**2
    turned = Turned()
    contents = contraction(t, t.add(query, biases["r_w_bias"]), key, pairs, spec.head_dim, turned)
    distances = contraction(
        t, t.add(query, biases["r_r_bias"]), places, 2 * pairs, spec.head_dim, turned
    )
    shifted = _shifted(t, distances, pairs)
    scores = t.scale(t.shift(t.add(contents, shifted)))
    probabilities = dropout(t, softmax(t, scores), spec.dropout)
    found = contraction(t, probabilities, value, x.numel // hidden * size, context.seq_len, turned)
    t.touch(contents, shifted, scores, probabilities)
    context.attention_frame = (query, key, value, places, found)
    return contraction(
        t, found, t.cast_weight(weights["o"]), x.numel, size, Turned(first=True, second=True)
    )


def _weight(t: Tape, name: str, hidden: int, spec: RelativeSpec) -> Parameter:
    role = WeightRole.ATTENTION_OUTPUT if name == "o" else WeightRole.MATRIX
    return t.parameter(
        f"self_attn.{name}", hidden, spec.num_heads, spec.head_dim, module="self_attn", role=role
    )


def _projected(t: Tape, x: Tensor, weight: Parameter, size: int) -> Tensor:
    """``einsum("ibh,hnd->ibnd")``: one batched product of a batch of one."""
    given = x if t.autocast is None else t.cast(x, t.autocast)
    factor = t.cast_weight(weight)
    rows = x.numel // weight.shape[0]
    out = t.tensor(rows * size, given.dtype)
    saves = (factor, given) if given.requires_grad else (given,)
    t.record(
        OperationKind.MATMUL, (given, factor), (out,), saves=saves,
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * rows * weight.numel,
    )  # fmt: skip
    t.touch(x)
    return out


def _shifted(t: Tape, x: Tensor, numel: int) -> Tensor:
    """``rel_shift_bnij``: all but the first number of each row, of which half are taken."""
    part = t.slice(x, x.numel)
    out = t.tensor(numel, x.dtype)
    t.record(OperationKind.INDEX_SELECT, (part,), (out,), gradients=(Gradient.FRESH,))
    return out
