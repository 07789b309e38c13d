"""From hidden states to queries, keys and values."""

from memplan.graph.attention.head_layout import Shape, as_heads
from memplan.graph.attention.rotary import turned_in_place, turns_heads
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec, Projection
from memplan.model.parameters import WeightRole


def project(
    t: Tape,
    x: Tensor,
    spec: AttentionSpec,
    context: StackContext,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, in one linear layer or three."""
    hidden = context.hidden_size
    split = shape is not None and shape.heads_split
    # Heads that were turned get their gradients head by head from any kernel.
    in_rows = turned_in_place(t, spec)
    turned = not in_rows and (split or turns_heads(t, spec))
    kv_size = spec.num_kv_heads * spec.head_dim
    if spec.projection is Projection.SEPARATE:
        apart = not spec.is_projected_first
        query = _query(t, x, spec, hidden, viewed=turned and apart)
        columns = shape is not None and keys_in_columns(spec, shape)
        role = WeightRole.QUERY_KEY
        key = _column(t, x, "k_proj", hidden, kv_size, bias=spec.key_bias, role=role)
        if split and not apart and columns_copied(spec, shape):
            key = as_heads(t, key, spec.num_kv_heads)
        seen = turned and apart
        key = _heads(t, key, spec, "k", spec.num_kv_heads, viewed=seen, in_columns=columns)
        width = spec.num_kv_heads * (spec.value_head_dim or spec.head_dim)
        value = _column(t, x, "v_proj", hidden, width, bias=spec.value_bias)
        value = as_heads(t, value, spec.num_kv_heads) if split and apart else value
        return query, key, value
    query, key, value = _fused_projection(t, x, spec, hidden)
    if spec.projection is Projection.FUSED_SPLIT and (split or turned):
        if not in_rows and not spec.query_viewed_last:
            query = as_heads(t, query, spec.num_heads)
        if not in_rows:
            columns = shape is not None and keys_in_columns(spec, shape)
            key = as_heads(t, key, spec.num_kv_heads, in_columns=columns)
        value = as_heads(t, value, spec.num_kv_heads) if split else value
        if not in_rows and spec.query_viewed_last:
            query = as_heads(t, query, spec.num_heads)
    return query, key, value


def _query(t: Tape, x: Tensor, spec: AttentionSpec, hidden: int, *, viewed: bool) -> Tensor:
    width, role = spec.num_heads * spec.head_dim, WeightRole.QUERY_KEY
    query = _column(t, x, "q_proj", hidden, width, bias=spec.query_bias, role=role)
    return _heads(t, query, spec, "q", spec.num_heads, viewed=viewed)


def keys_in_columns(spec: AttentionSpec, shape: Shape) -> bool:
    """Whether the gradient of the keys is seen as rows as the product of scores gives it: in columns.

    It is that of a transposed factor. Nothing copies it where the fused projection's parts are joined
    anyway, and a projection of their own takes it if there is one sequence, whose rows and columns change
    places in a view; heads that are turned, normed or repeated come back in rows.
    """
    whole = spec.projection is Projection.FUSED_SPLIT
    return _comes_in_columns(spec, shape) and (shape.batch == 1 or whole)


def columns_copied(spec: AttentionSpec, shape: Shape | None) -> bool:
    """Whether the keys' projection copies that gradient into rows, for itself."""
    return shape is not None and shape.batch > 1 and _comes_in_columns(spec, shape)


def _comes_in_columns(spec: AttentionSpec, shape: Shape) -> bool:
    if not shape.heads_split or spec.rotary is not None or spec.query_key_norm is not None:
        return False
    return shape.groups == 1 and not spec.upcast_reordered


def _column(
    t: Tape,
    x: Tensor,
    name: str,
    hidden: int,
    width: int,
    *,
    bias: bool,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """One of them: a rank has some of the heads."""
    columns = t.options.split_plan.attention.columns
    return linear(t, x, f"self_attn.{name}", hidden, width, bias=bias, split=columns, role=role)


def _heads(
    t: Tape,
    x: Tensor,
    spec: AttentionSpec,
    name: str,
    num_heads: int,
    *,
    viewed: bool,
    in_columns: bool = False,
) -> Tensor:
    """A projection as heads, each normed at once where the class does so."""
    kind = spec.query_key_norm if spec.query_key_norm_at_once else None
    x = as_heads(t, x, num_heads, in_columns=in_columns) if viewed else x
    return x if kind is None else norm(t, x, kind, f"self_attn.{name}_norm", spec.head_dim)


def _fused_projection(
    t: Tape, x: Tensor, spec: AttentionSpec, hidden: int
) -> tuple[Tensor, Tensor, Tensor]:
    query_size = spec.num_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    width = query_size + 2 * kv_size
    fused = _column(t, x, "qkv_proj", hidden, width, bias=spec.query_bias)
    tokens = x.numel // hidden
    if spec.projection is not Projection.FUSED_SPLIT:
        return _split_per_head(t, fused, spec.projection)
    query, key, value = t.split(fused, tokens * query_size, tokens * kv_size, tokens * kv_size)
    return query, key, value


def _split_per_head(
    t: Tape, fused: Tensor, projection: Projection
) -> tuple[Tensor, Tensor, Tensor]:
    """Thirds of every head's columns, all of them views."""
    third = fused.numel // 3
    if projection is Projection.FUSED_SELECTED:
        return t.slice(fused, third), t.slice(fused, third), t.slice(fused, third)
    # The view's gradient is joined head by head, then copied back into rows.
    query, key, value = t.split(t.slice(fused, fused.numel), third, third, third)
    return query, key, value
