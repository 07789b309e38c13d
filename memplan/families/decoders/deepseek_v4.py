"""DeepSeek-V4 (``modeling_deepseek_v4.py``, transformers 5.23)."""

from dataclasses import replace

from memplan.families.decoders.hybrids import Hybrid, read_hybrid
from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.compressed import CompressedAttentionSpec, CompressorSpec, StreamsSpec
from memplan.model.config import ConfigReader
from memplan.model.latent import IndexerSpec
from memplan.model.layers import LayerSpec
from memplan.model.mixtures import MixtureSpec, Normalization, RouterScore, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS_UPCAST)
SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Kinds of layers by what ``compress_ratios`` says."""
RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens that one compressed entry stands for where the config is silent."""
RATE_KEYS = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
HASHED, ROUTED = "hash_moe", "moe"
NUM_HASHED = 3
"""First layers whose experts a table chooses, where the config is silent."""
ROTATED_SHARE = 64 / 512


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of DeepSeek-V4."""
    model = read_hybrid(reader, request, DEEPSEEK_V4)
    stack = replace(model.stacks[0], streams=_streams(reader))
    return replace(model, stacks=(stack,), eager_attention_only=True)


def _streams(reader: ConfigReader) -> StreamsSpec:
    return StreamsSpec(
        count=reader.integer("hc_mult"), iterations=reader.integer("hc_sinkhorn_iters")
    )


def _kinds(reader: ConfigReader) -> list[str]:
    """Which attention and which router."""
    count = reader.layers("num_hidden_layers")
    networks = reader.texts("mlp_layer_types")
    if not networks:
        hashed = reader.integer("num_hash_layers", minimum=0, default=NUM_HASHED)
        networks = [HASHED if number < hashed else ROUTED for number in range(count)]
    if len(networks) < count:
        error = reader.fail("mlp_layer_types", f"names {len(networks)} layers of {count}")
        raise error
    for name in networks:
        reader.choice("mlp_layer_types", name, (HASHED, ROUTED))
    kinds = _attention_kinds(reader, count)
    return [f"{kind} {network}" for kind, network in zip(kinds, networks, strict=False)]


def _attention_kinds(reader: ConfigReader, count: int) -> list[str]:
    """``layer_types``, or ``compress_ratios``, or two heavy ones and then both in turns."""
    named = reader.texts("layer_types")
    if not named:
        ratios = reader.integers("compress_ratios")
        for ratio in ratios:
            if ratio not in RATIOS:
                error = reader.fail("compress_ratios", f"{ratio} is none of 0, 4, 128")
                raise error
        named = [RATIOS[ratio] for ratio in ratios]
    if not named:
        named = [HEAVY, HEAVY] + [SPARSE if each % 2 else HEAVY for each in range(count - 2)]
    if len(named) < count:
        error = reader.fail("layer_types", f"names {len(named)} layers of {count}")
        raise error
    for name in named:
        reader.choice("layer_types", name, RATIOS.values())
    return named[:count]


def _rate(reader: ConfigReader, kind: str) -> int:
    legacy = reader.optional_integer(RATE_KEYS[kind])
    if legacy is not None:
        return legacy
    rates = reader.mapping("compress_rates")
    value = rates.get(kind) if rates is not None else None
    return value if isinstance(value, int) else RATES[kind]


def _layer(reader: ConfigReader, kind: str) -> LayerSpec:
    attention, _, network = kind.partition(" ")
    return LayerSpec(
        attention=_attention(reader, attention),
        feed_forward=_mixture(reader, hashed=network == HASHED),
        norm=NORM,
        streams=_streams(reader),
    )


def _attention(reader: ConfigReader, kind: str) -> CompressedAttentionSpec:
    """Many queries out of a narrow vector, one head that is key and value, a grouped output."""
    heads, head_dim = reader.integer("num_attention_heads"), reader.integer("head_dim")
    groups = reader.integer("o_groups")
    reader.divide("num_attention_heads", heads * head_dim, "o_groups", groups)
    rotated = reader.optional_integer("qk_rope_head_dim")
    if rotated is None:
        rotated = int(head_dim * reader.number("partial_rotary_factor", default=ROTATED_SHARE))
    scores = AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        rotary=RotarySpec(dim=rotated, repeated=True),
        own_eager=True,
        sinks=True,
        sliding_window=reader.integer("sliding_window"),
        dropout=reader.number("attention_dropout"),
    )
    compressor = None
    if kind != SLIDING:
        sparse = kind == SPARSE
        compressor = CompressorSpec(
            rate=_rate(reader, kind),
            overlapping=sparse,
            indexer=_indexer(reader, rotated) if sparse else None,
        )
    return CompressedAttentionSpec(
        scores=scores,
        query_rank=reader.integer("q_lora_rank"),
        output_groups=groups,
        output_rank=reader.integer("o_lora_rank"),
        norm=NORM,
        compressor=compressor,
    )


def _indexer(reader: ConfigReader, rotated: int) -> IndexerSpec:
    return IndexerSpec(
        num_heads=reader.integer("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        rotary_dim=rotated,
        top_k=reader.integer("index_topk"),
    )


def _mixture(reader: ConfigReader, *, hashed: bool) -> MixtureSpec:
    """Experts that a router or, for the first layers, a table of token ids chooses."""
    experts, active = reader.integer("n_routed_experts"), reader.integer("num_experts_per_tok")
    if active > experts:
        error = reader.fail("num_experts_per_tok", f"{active} of {experts} experts")
        raise error
    expert = FeedForwardSpec(
        intermediate_size=reader.integer("moe_intermediate_size"),
        activation=read_activation(reader, "hidden_act"),
        gated=True,
        clamped=True,
    )
    scoring = reader.text("scoring_func", default="sqrtsoftplus")
    scores = {
        "sqrtsoftplus": RouterScore.SQRT_SOFTPLUS,
        "softmax": RouterScore.SOFTMAX,
        "sigmoid": RouterScore.SIGMOID,
    }
    return MixtureSpec(
        num_experts=experts,
        num_experts_per_token=active,
        expert=expert,
        router=RouterSpec(
            score=scores[reader.choice("scoring_func", scoring, scores)],
            correction=not hashed,
            table_rows=reader.integer("vocab_size") if hashed else 0,
            normalization=Normalization.COPY,
            scaled=True,
        ),
        shared=replace(expert, bias=reader.flag("mlp_bias")),
    )


DEEPSEEK_V4 = Hybrid(kinds=_kinds, layer=_layer, final_norm=NORM, router_loss=True)
