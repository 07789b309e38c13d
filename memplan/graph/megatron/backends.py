"""Whose modules stand where (Megatron-core 0.16.1, core/models/backends.py, core/extensions/transformer_engine_spec_provider.py)."""

from memplan.graph.megatron.attention import (
    DotProductAttention,
    SelfAttention,
    TEDotProductAttention,
)
from memplan.graph.megatron.config import Backend
from memplan.graph.megatron.kwai import KwaiSelfAttention, KwaiTransformerLayer
from memplan.graph.megatron.latent import MLASelfAttention
from memplan.graph.megatron.layer import TransformerLayer
from memplan.graph.megatron.layers import (
    ColumnParallelLinear,
    KwaiColumnParallelLinear,
    KwaiRowParallelLinear,
    RowParallelLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from memplan.graph.megatron.mlp import MLP, KwaiMLP
from memplan.training.splitting.megatron import (
    MegatronLayers,
    RecomputeModule,
    TransformerImpl,
)

LOCAL = Backend(
    column=ColumnParallelLinear,
    normed_column=ColumnParallelLinear,
    row=RowParallelLinear,
    network_row=RowParallelLinear,
    core_attention=DotProductAttention,
    attention=SelfAttention,
    network=MLP,
    layer=TransformerLayer,
)
TRANSFORMER_ENGINE = LOCAL._replace(
    column=TEColumnParallelLinear, normed_column=TELayerNormColumnParallelLinear,
    row=TERowParallelLinear, network_row=TERowParallelLinear, core_attention=TEDotProductAttention,
)  # fmt: skip
LATENT = TRANSFORMER_ENGINE._replace(attention=MLASelfAttention)
KWAI = LOCAL._replace(
    network_row=KwaiRowParallelLinear, core_attention=TEDotProductAttention, network=KwaiMLP
)


def backend_of(settings: MegatronLayers, *, is_latent: bool, shares_sequences: bool) -> Backend:
    """Those of a layer."""
    if settings.transformer_impl is TransformerImpl.KWAI:
        return _kwai(settings, shares_sequences=shares_sequences)
    if is_latent:
        return LATENT
    is_local = settings.transformer_impl is TransformerImpl.LOCAL
    return LOCAL if is_local else TRANSFORMER_ENGINE


def _kwai(settings: MegatronLayers, *, shares_sequences: bool) -> Backend:
    """Norms are computed again inside of products, and attention is another where ranks share sequences."""
    found = KWAI
    if settings.recomputes(RecomputeModule.LAYERNORM):
        found = found._replace(normed_column=KwaiColumnParallelLinear)
    if shares_sequences:
        found = found._replace(
            row=KwaiRowParallelLinear, attention=KwaiSelfAttention, layer=KwaiTransformerLayer
        )
    return found
