"""Attention whose keys and values later layers read too (transformers 5.23, ``Gemma4TextAttention``).

Queries are projected, normed and turned before keys are; a layer that reads an earlier one's keys and
values makes queries alone. The model holds what is handed on until its layers have run.
"""

from dataclasses import replace

from memplan.errors import SetupError
from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.operations.rotary import rotary
from memplan.graph.stack_context import StackContext
from memplan.model.parameters import WeightRole
from memplan.model.shared_keys import KeySource, SharedKeysSpec


def shared_keys_attention(
    t: Tape, x: Tensor, spec: SharedKeysSpec, context: StackContext
) -> Tensor:
    """Queries, keys and values of this layer or of an earlier one, attention, output projection."""
    scores = spec.scores
    projected = _projected(t, x, "q", scores.num_heads, scores.query_bias, spec, context)
    query = _normed_and_turned(t, projected, "q", spec, context)
    key, value = _keys_and_values(t, x, spec, context)
    shape = Shape(context.batch, context.seq_len, context.seq_len, scores)
    if splits_heads(t, scores):
        shape = replace(shape, heads_split=True)
    mask = context.mask if scores.sliding_window is None else context.sliding_mask
    out = attend(t, query, key, value, shape, mask)
    out = linear(
        t, out, "self_attn.o_proj", scores.num_heads * scores.head_dim, context.hidden_size,
        bias=scores.output_bias, role=WeightRole.ATTENTION_OUTPUT,
    )  # fmt: skip
    t.touch(query, key, value, x)
    return out


def _keys_and_values(
    t: Tape, x: Tensor, spec: SharedKeysSpec, context: StackContext
) -> tuple[Tensor, Tensor]:
    """Of this layer, or what an earlier one of the same kind has handed on."""
    scores = spec.scores
    windowed = scores.sliding_window is not None
    if spec.source is not KeySource.OWN and t.hooks is not None:
        msg = (
            "offload_activations: is not modelled where layers read an earlier one's keys and values; the "
            "nearest that is: checkpointing full"
        )
        raise SetupError(msg)
    if spec.source is KeySource.EARLIER:
        return context.handed_on[windowed]
    projected = _projected(t, x, "k", scores.num_kv_heads, scores.key_bias, spec, context)
    if spec.values_from_keys:
        plain = projected
    else:
        plain = _projected(t, x, "v", scores.num_kv_heads, scores.value_bias, spec, context)
    key = _normed_and_turned(t, projected, "k", spec, context)
    value = norm(t, plain, replace(spec.norm, weight=False), "self_attn.v_norm", scores.head_dim)
    if spec.source is KeySource.HANDED_ON:
        t.hold_graph(key, value)
        context.handed_on[windowed] = (key, value)
    return key, value


def _projected(
    t: Tape,
    x: Tensor,
    name: str,
    num_heads: int,
    bias: bool,
    spec: SharedKeysSpec,
    context: StackContext,
) -> Tensor:
    """A linear layer, its rows seen as heads."""
    role = WeightRole.MATRIX if name == "v" else WeightRole.QUERY_KEY
    made = linear(
        t, x, f"self_attn.{name}_proj", context.hidden_size, num_heads * spec.scores.head_dim,
        bias=bias, role=role,
    )  # fmt: skip
    # Heads are turned in rows: only scores that are written out give gradients head by head.
    return as_heads(t, made, num_heads) if splits_heads(t, spec.scores) else made


def _normed_and_turned(
    t: Tape, x: Tensor, name: str, spec: SharedKeysSpec, context: StackContext
) -> Tensor:
    """The norm of each head, then its place; what was projected is let go in between."""
    normed = norm(t, x, spec.norm, f"self_attn.{name}_norm", spec.scores.head_dim)
    cos, sin = context.tables(spec.scores)
    turned = rotary(t, normed, cos, sin)
    t.touch(normed)
    return turned
