"""Decoders whose layers are counted part by part: RWKV, RecurrentGemma, Zamba.

Norms, residual sums and what else is a usual operation are written down; the rest is weights.
"""

from dataclasses import replace

from memplan.graph.families.hybrids import (
    NORM,
    attention_weights,
    bamba_sizes,
    counted,
    gated_network,
    layer_kinds,
    single,
)
from memplan.graph.families.llama import (
    Variation,
    decoder_model,
    join_runs,
    read_activation,
    read_attention,
)
from memplan.graph.families.request import ReadRequest
from memplan.graph.families.state_space import (
    Mamba,
    Mamba2,
    expanded,
    mamba2,
    mamba_heads,
    time_step_rank,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import (
    NOTHING,
    CountedSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    NormKind,
    NormPlacement,
    NormSpec,
    StackSpec,
)

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
GEMMA_NORM = NormSpec(kind=NormKind.RMS_GEMMA)
