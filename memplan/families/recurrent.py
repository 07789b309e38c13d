"""Decoders with recurrent layers and a shape of their own: RWKV, RecurrentGemma, Zamba."""

from dataclasses import replace
from itertools import count

from memplan.families.hybrids import (
    LEGACY_KINDS,
    Hybrid,
    plain_attention,
    read_hybrid,
    single,
)
from memplan.families.llama import Variation, read_activation
from memplan.families.request import ReadRequest
from memplan.families.state_space import expanded, time_step_rank
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec, SharedBlockSpec
from memplan.model.mixers import (
    ChannelMixingSpec,
    GatedRecurrenceSpec,
    Mamba2Spec,
    MambaHeadsSpec,
    MambaSpec,
    TimeMixingSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS)
LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
GEMMA_NORM = NormSpec(kind=NormKind.RMS_GEMMA)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``RECURRENT``."""
    return read_hybrid(reader, request, RECURRENT[request.model_type])


# -- RWKV ----------------------------------------------------------------------------------------


def _rwkv_kinds(reader: ConfigReader) -> list[str]:
    return ["first"] + ["later"] * (reader.layers("num_hidden_layers") - 1)


def _rwkv_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Time mixing and channel mixing; the first layer owns a norm of the embeddings."""
    hidden_size = reader.integer("hidden_size")
    width = reader.integer("attention_hidden_size", default=hidden_size)
    inner = reader.integer("intermediate_size", default=4 * hidden_size)

    return LayerSpec(
        attention=TimeMixingSpec(width=width),
        feed_forward=ChannelMixingSpec(intermediate_size=inner),
        norm=LAYER_NORM,
        entry_norm=kind == "first",
    )


# -- RecurrentGemma ------------------------------------------------------------------------------


def _griffin_kinds(reader: ConfigReader) -> list[str]:
    """``block_types``, repeated as often as there are layers."""
    pattern = reader.texts("block_types")
    if not pattern:
        error = reader.fail("block_types", "names no kind of layer")
        raise error
    count = reader.layers("num_hidden_layers")
    return [pattern[number % len(pattern)] for number in range(count)]


def _griffin_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    half = reader.divide("intermediate_size", reader.integer("intermediate_size"), "halves", 2)
    return LayerSpec(
        attention=_griffin_mixer(reader, kind),
        feed_forward=FeedForwardSpec(
            intermediate_size=half,
            activation=read_activation(reader, "hidden_activation"),
            gated=True,
            bias=True,
        ),
        norm=GEMMA_NORM,
    )


def _griffin_mixer(reader: ConfigReader, kind: str) -> AttentionSpec | GatedRecurrenceSpec:
    hidden_size = reader.integer("hidden_size")
    if reader.choice("block_types", kind, ("attention", "recurrent")) == "attention":
        bias = reader.flag("attention_bias")
        variation = Variation(qkv_bias=bias, output_bias=True)
        spec = plain_attention(reader, variation, rotary_share=0.5)
        rotary = replace(spec.rotary, own_tables=True) if spec.rotary is not None else None
        window = reader.integer("attention_window_size")
        return replace(spec, sliding_window=window, rotary=rotary)
    width = reader.integer("lru_width", default=hidden_size)
    num_heads = reader.integer("num_attention_heads")
    reader.divide("lru_width", width, "num_attention_heads", num_heads)
    return GatedRecurrenceSpec(
        width=width,
        num_heads=num_heads,
        kernel=reader.integer("conv1d_width"),
        activation=read_activation(reader, "hidden_activation"),
    )


# -- Zamba ---------------------------------------------------------------------------------------


def _hybrid_kinds(names: list[str]) -> list[str]:
    """``linear_attention``, or ``hybrid`` with how many of these came before.

    >>> _hybrid_kinds(["hybrid", "linear_attention", "hybrid"])
    ['hybrid 0', 'linear_attention', 'hybrid 1']
    """
    turns = count()
    return [f"hybrid {next(turns)}" if name == "hybrid" else name for name in names]


def _named_kinds(reader: ConfigReader) -> list[str]:
    found = [LEGACY_KINDS.get(each, each) for each in reader.texts("layers_block_type")]
    for each in found:
        reader.choice("layers_block_type", each, ("hybrid", "linear_attention"))
    return found


def _zamba_kinds(reader: ConfigReader) -> list[str]:
    names = _named_kinds(reader)
    if not names:
        period = reader.integer("attn_layer_period")
        offset = reader.integer("attn_layer_offset", minimum=0)
        names = ["linear_attention", "linear_attention", "hybrid"] + [
            "hybrid" if number % period == offset else "linear_attention"
            for number in range(reader.layers("num_hidden_layers") - 3)
        ]
    return _hybrid_kinds(names)


def _zamba_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    mixer = _zamba_mixer(reader)
    if kind == "linear_attention":
        return single(mixer)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("attention_head_dim", default=2 * hidden_size // num_heads)
    width = reader.integer("attention_hidden_size", default=2 * hidden_size)
    if width != 2 * hidden_size:
        problem = f"{width} is not twice the hidden_size ({hidden_size})"
        key = "attention_hidden_size"
        raise reader.fail(key, problem)
    block = SharedBlockSpec(
        scores=_block_scores(reader, head_dim),
        network=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            gated=True,
        ),
        number=0,
        turn=int(kind.split()[1]),
    )
    return replace(single(mixer), shared_block=block)


def _zamba_mixer(reader: ConfigReader) -> MambaHeadsSpec:
    hidden_size = reader.integer("hidden_size")
    inner = expanded(reader, "mamba_expand", hidden_size)
    num_heads = reader.integer("n_mamba_heads")
    head = MambaSpec(
        inner=reader.divide("mamba_expand", inner, "n_mamba_heads", num_heads),
        state=reader.integer("mamba_d_state"),
        rank=time_step_rank(reader, "mamba_dt_rank", hidden_size),
        kernel=reader.integer("mamba_d_conv"),
        activation=read_activation(reader, "hidden_mamba_act"),
        bias=reader.flag("mamba_proj_bias"),
        convolution_bias=reader.flag("mamba_conv_bias"),
    )
    return MambaHeadsSpec(head=head, num_heads=num_heads)


def _block_scores(reader: ConfigReader, head_dim: int) -> AttentionSpec:
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    reader.divide("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dropout=reader.number("attention_dropout"),
    )


_ZAMBA2_NAMES = (
    *("linear_attention",),
    *(*("linear_attention",) * 5, "hybrid") * 7,
    *(*("linear_attention",) * 4, "hybrid"),
    *(*("linear_attention",) * 3, "hybrid"),
    *("linear_attention",) * 2,
)
"""What ``Zamba2Config`` fills in, whatever the number of layers."""


def _zamba2_names(reader: ConfigReader) -> list[str]:
    return _named_kinds(reader) or list(_ZAMBA2_NAMES)


def _zamba2_kinds(reader: ConfigReader) -> list[str]:
    return _hybrid_kinds(_zamba2_names(reader))


def _zamba2_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    hidden_size = reader.integer("hidden_size")
    bias = reader.flag("add_bias_linear")
    mixer = Mamba2Spec(
        inner=expanded(reader, "mamba_expand", hidden_size),
        heads=reader.integer("n_mamba_heads"),
        groups=reader.integer("mamba_ngroups"),
        state=reader.integer("mamba_d_state"),
        kernel=reader.integer("mamba_d_conv"),
        chunk=reader.integer("chunk_size"),
        activation=Activation.SILU,
        bias=bias,
        output_bias=bias,
        convolution_bias=True,
    )
    if kind == "linear_attention":
        return single(mixer)
    turn = int(kind.split()[1])
    return replace(single(mixer), shared_block=_zamba2_block(reader, turn))


def _zamba2_block(reader: ConfigReader, turn: int) -> SharedBlockSpec:
    """One of the shared blocks, which hybrid layers run in turns."""
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.divide("hidden_size", 2 * hidden_size, "num_attention_heads", num_heads)
    scores = _block_scores(reader, head_dim)
    adapts = reader.flag("use_shared_attention_adapter")
    if adapts and scores.num_kv_heads != scores.num_heads:
        problem = "the adapters of keys are as wide as queries"
        key = "num_key_value_heads"
        raise reader.fail(key, problem)
    rotary = RotarySpec(dim=head_dim) if reader.flag("use_mem_rope") else None
    return SharedBlockSpec(
        scores=replace(scores, rotary=rotary),
        network=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size", default=4 * hidden_size),
            activation=read_activation(reader, "hidden_act"),
            gated=True,
            fused_gate_up=True,
            bias=reader.flag("add_bias_linear"),
        ),
        number=turn % reader.integer("num_mem_blocks"),
        turn=turn,
        adapter_rank=reader.integer("adapter_rank"),
        adapts_attention=adapts,
    )


RECURRENT: dict[str, Hybrid] = {
    "rwkv": Hybrid(
        kinds=_rwkv_kinds,
        layer=_rwkv_layer,
        final_norm=LAYER_NORM,
    ),
    "recurrent_gemma": Hybrid(
        kinds=_griffin_kinds,
        layer=_griffin_layer,
        embedding_scaled=True,
        unscaled_held=True,
        softcap_key="logits_soft_cap",
        final_norm=GEMMA_NORM,
    ),
    "zamba": Hybrid(
        kinds=_zamba_kinds,
        layer=_zamba_layer,
        embedding_copied=True,
    ),
    "zamba2": Hybrid(
        kinds=_zamba2_kinds,
        layer=_zamba2_layer,
        embedding_copied=True,
    ),
}
