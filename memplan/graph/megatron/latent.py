"""DeepSeek's latent attention as Megatron-core runs it over TransformerEngine.

Megatron-core 0.16.1, core/transformer/multi_latent_attention.py (``MLASelfAttention``) and core/fusions/
fused_mla_yarn_rope_apply.py: the layers into the narrow vectors are whole on every rank, norms are fused with the
layers out of them; queries are turned where they lie, keys and values are laid out anew.
"""

from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.kernels import cudnn, flash
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.norms import norm
from memplan.graph.megatron.parallel import weight_of
from memplan.graph.megatron.recomputation import discard
from memplan.graph.megatron.transformer_engine import (
    attention_kernel,
    column_linear,
    linear,
    norm_linear,
    whole_linear,
)
from memplan.model.latent import LatentAttentionSpec
from memplan.model.norms import NormSpec
from memplan.training.choices_of_kernels.sdpa import ScoreKernel
from memplan.training.splitting.exchange import ExchangeKind, Group, Send, Sends
from memplan.training.splitting.megatron import RecomputeModule


def latent_attention(
    c: MegatronContext, x: Tensor, spec: LatentAttentionSpec, layer_norm: NormSpec, prefix: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the output projection gives, and what the layer's variables hold meanwhile."""
    t, name, settings = c.tape, f"{prefix}self_attention", c.settings
    first = len(t.segment.operations)
    normed = norm(c, x, layer_norm, f"{prefix}input_layernorm", c.hidden_size)
    head = spec.plain_head_dim + spec.rotary.dim
    proj = weight_of(c, f"{name}.linear_proj", c.hidden_size, spec.num_heads * spec.value_head_dim)
    narrow, start = _narrow_queries(c, normed, spec, name), len(t.segment.operations)
    query = _queries(c, narrow, spec, name, head)
    pair, position = _narrow_pairs(c, normed, spec, name)
    key, value = _keys_and_values(c, pair, position, spec, name)
    stop = len(t.segment.operations)
    out = _scores(c, query, key, value, spec)
    if settings.recomputes(RecomputeModule.MLA_UP_PROJ):
        discard(c, start, stop, (query, key, value), given=(pair, position))
    projected = linear(c, out, proj)
    t.touch(query, key, value, out)
    if settings.recomputes(RecomputeModule.LAYERNORM):
        discard(c, first, first + 1, (normed,))
        return projected, ()
    return projected, (normed,)


def _narrow_queries(c: MegatronContext, x: Tensor, spec: LatentAttentionSpec, name: str) -> Tensor:
    """What queries are made from."""
    if spec.query_rank is None:
        return x
    return whole_linear(c, x, f"{name}.linear_q_down_proj", spec.query_rank, c.hidden_size)


def _queries(
    c: MegatronContext, narrow: Tensor, spec: LatentAttentionSpec, name: str, head: int
) -> Tensor:
    columns = spec.num_heads * head
    if spec.query_rank is None:
        weight = weight_of(c, f"{name}.linear_q_proj", columns, c.hidden_size)
        return _turned(c, column_linear(c, narrow, weight))
    up = weight_of(c, f"{name}.linear_q_up_proj", columns, spec.query_rank)
    return _turned(c, norm_linear(c, narrow, spec.norm, f"{name}.linear_q_up_proj", up))


def _turned(c: MegatronContext, query: Tensor) -> Tensor:
    """Where it lies, and its gradient too."""
    out = c.tape.view(query, query.numel)
    c.tape.record(
        OperationKind.ROTARY, (query,), (out,), gradients=(Gradient.ALIAS,), in_python=True
    )
    return out


def _narrow_pairs(
    c: MegatronContext, x: Tensor, spec: LatentAttentionSpec, name: str
) -> tuple[Tensor, Tensor]:
    """What keys and values are made from: a narrow vector, and one that is turned, of all tokens."""
    t = c.tape
    rank, turned = spec.key_value_rank, spec.rotary.dim
    both = whole_linear(c, x, f"{name}.linear_kv_down_proj", rank + turned, c.hidden_size)
    rows = c.stream_tokens
    narrow, position = t.split(both, rows * rank, rows * turned)
    if c.sequence:
        gathered = t.tensor(c.tokens * turned, c.dtype)
        size = gathered.storage.num_bytes
        kinds = ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER
        forward, backward = (Send(kind, size, Group.SPLIT) for kind in kinds)
        t.record(
            OperationKind.ALL_GATHER, (position,), (gathered,), gradients=(Gradient.FRESH,),
            sends=Sends((forward,), (backward,)),
        )  # fmt: skip
        position = gathered
    # A module's input is laid row after row first.
    return t.contiguous(narrow), position


def _keys_and_values(
    c: MegatronContext, narrow: Tensor, position: Tensor, spec: LatentAttentionSpec, name: str
) -> tuple[Tensor, Tensor]:
    t = c.tape
    widths = spec.plain_head_dim + spec.value_head_dim
    up = weight_of(c, f"{name}.linear_kv_up_proj", spec.num_heads * widths, spec.key_value_rank)
    wide = norm_linear(c, narrow, spec.norm, f"{name}.linear_kv_up_proj", up)
    key = t.tensor(c.tokens * spec.num_heads * (spec.plain_head_dim + spec.rotary.dim), c.dtype)
    value = t.tensor(c.tokens * spec.num_heads * spec.value_head_dim, c.dtype)
    t.record(
        OperationKind.ROTARY, (wide, position), (key, value),
        gradients=(Gradient.FRESH, Gradient.FRESH), in_python=True,
    )  # fmt: skip
    t.touch(wide, position)
    return key, value


def _scores(
    c: MegatronContext, query: Tensor, key: Tensor, value: Tensor, spec: LatentAttentionSpec
) -> Tensor:
    scores = spec.scores
    shape = Shape(c.batch, c.seq_len, c.seq_len, scores)
    if attention_kernel(c, scores) is ScoreKernel.CUDNN:
        return cudnn(c.tape, query, key, value, shape, None)
    return flash(c.tape, query, key, value, shape)
