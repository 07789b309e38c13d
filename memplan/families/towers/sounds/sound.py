"""Encoders of sound: Whisper's and its kin, Conformers.

Classes of transformers 5.23: ``WhisperEncoder``, ``Qwen2AudioEncoder``, ``VoxtralEncoder``,
``Qwen2_5OmniAudioEncoder``, ``GlmAsrEncoder``, ``GraniteSpeechCTCEncoder``, ``Gemma4AudioModel``.
"""

from dataclasses import replace

from memplan.families.towers.blocks import (
    TowerLayer,
    declare_layer,
    declare_layers,
    layer_body,
    perceptron,
)
from memplan.families.towers.layers import tower_activation
from memplan.model.attention import RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.layers import Turning
from memplan.model.towers.parts import NormBody
from memplan.model.towers.sounds import FramesBody, HalvedFramesBody, SignalBody, TurningTablesBody

STEM_KERNEL = 3
"""Of the two convolutions over the spectrum."""
CUBE = 3
"""Kernel of Gemma 4's convolutions, which quarter both axes together."""


def whisper_encoder(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    averaged: bool = False,
    cast_back: bool = False,
) -> None:
    """Whisper's: a table of sinusoids that is a parameter, but not trained.

    ``averaged`` pools pairs of frames before the last norm (Qwen2-Audio); ``cast_back`` casts the sum
    with the sinusoids (Voxtral).
    """
    size, rows = reader.integer("d_model", "hidden_size"), reader.integer("max_source_positions")
    bins, drop = reader.integer("num_mel_bins"), reader.number("dropout", default=0.0)
    first = SignalBody(
        module="conv1", kernel=STEM_KERNEL, stride=1, padding=1, activation=Activation.GELU,
        channels=bins, length=2 * rows, casts=True,
    )  # fmt: skip
    second = replace(first, module="conv2", stride=2, channels=0, length=0, last=True)
    _stem(table, name, reader, size, ChainBody(parts=(first, second)))
    frames = FramesBody(positions="embed_positions", cast_back=cast_back, dropout=drop)
    with table.block(f"{name}.positions", body=frames):
        table.untrained("embed_positions", "weight", rows, size)
    _layers(table, name, reader, size, written=True)
    norm = NormBody(module="layer_norm", size=size)
    last = ChainBody(parts=(HalvedFramesBody(), norm)) if averaged else norm
    with table.block(f"{name}.norm", body=last):
        table.norm("layer_norm", size)


def averaged_encoder(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Qwen2-Audio's."""
    whisper_encoder(table, name, reader, averaged=True)


def cast_encoder(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Voxtral's."""
    whisper_encoder(table, name, reader, cast_back=True)


def glm_encoder(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """GLM-ASR's: Whisper's with rotary positions, and heads as a decoder names them."""
    from memplan.families.llama import rotated_dim  # only here

    size, rows = reader.integer("hidden_size"), reader.integer("max_position_embeddings")
    heads = reader.integer("num_attention_heads")
    head_size = reader.optional_integer("head_dim")
    if head_size is None:
        head_size = reader.divide("hidden_size", size, "num_attention_heads", heads)
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=reader.integer("intermediate_size"),
        width=heads * head_size,
        key_value_width=reader.integer("num_key_value_heads", default=heads) * head_size,
        key_bias=False,
    )
    turned = rotated_dim(reader, head_size, 1.0)
    first = SignalBody(
        module="conv1", kernel=STEM_KERNEL, stride=1, padding=1, activation=Activation.GELU,
        channels=reader.integer("num_mel_bins"), length=2 * rows,
    )  # fmt: skip
    second = replace(first, module="conv2", stride=2, channels=0, length=0, last=True)
    tables = TurningTablesBody(dim=turned)
    _stem(table, name, reader, size, ChainBody(parts=(first, second, tables)))
    special = layer_body(layer, heads, tower_activation(reader, "hidden_act"))
    attention = replace(
        special.attention, rotary=RotarySpec(dim=turned, joined=True), names_weights=True,
        dropout=reader.number("attention_dropout", default=0.0),
    )  # fmt: skip
    body = replace(special, attention=attention, turning=Turning.IN_PART)
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers"), body=body):
        declare_layer(table, layer)
    with table.block(f"{name}.norm", body=NormBody(module="norm", size=size)):
        table.norm("norm", size)


def _stem(
    table: ParameterTable, name: str, reader: ConfigReader, size: int, body: ChainBody | None = None
) -> None:
    with table.block(f"{name}.stem", body=body):
        table.convolution("conv1", reader.integer("num_mel_bins"), size, STEM_KERNEL)
        table.convolution("conv2", size, size, STEM_KERNEL)


def _layers(
    table: ParameterTable, name: str, reader: ConfigReader, size: int, *, written: bool = False
) -> None:
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=reader.integer("encoder_ffn_dim", "intermediate_size"),
        key_bias=False,
    )
    count = reader.layers("encoder_layers", "num_hidden_layers")
    if not written:
        declare_layers(table, f"{name}.layers", count, layer)
        return
    heads = reader.integer("encoder_attention_heads", "num_attention_heads")
    active = tower_activation(reader, "activation_function")
    special = layer_body(layer, heads, active)
    attention = replace(
        special.attention, fp32_softmax=False,
        dropout=reader.number("attention_dropout", default=0.0),
    )  # fmt: skip
    body = replace(
        special, copies_heads=True, attention=attention,
        dropout=reader.number("dropout", default=0.0),
        activation_dropout=reader.number("activation_dropout", default=0.0),
    )  # fmt: skip
    with table.block(f"{name}.layers", count=count, body=body):
        declare_layer(table, layer)


def granite_encoder(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Granite Speech's Conformer, with a character classifier whose scores are fed back."""
    size, outputs = reader.integer("hidden_dim"), reader.integer("output_dim")
    with table.block(f"{name}.embed"):
        table.linear("input_linear", reader.integer("input_dim"), size)
    with table.block(f"{name}.layers", count=reader.layers("num_layers")):
        for half in ("ff1", "ff2"):
            table.norm(f"{half}.pre_norm", size)
            perceptron(table, half, size, size * reader.integer("feedforward_mult"))
        _granite_attention(table, reader, size)
        _granite_convolution(table, reader, size)
        table.norm("post_norm", size)
    with table.block(f"{name}.characters"):
        table.linear("out", size, outputs)
        table.linear("out_mid", outputs, size)


def _granite_attention(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    heads = reader.integer("num_heads")
    head_size = reader.optional_integer("dim_head")
    if head_size is None:
        head_size = reader.divide("hidden_dim", size, "num_heads", heads)
    width = head_size * heads
    table.norm("attn.pre_norm", size)
    table.linear("attn.to_q", size, width, bias=False)
    table.linear("attn.to_kv", size, 2 * width, bias=False)
    table.linear("attn.to_out", width, size)
    table.embedding("attn.rel_pos_emb", 2 * reader.integer("max_pos_emb") + 1, head_size)


def _granite_convolution(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    inner_size = size * reader.integer("conv_expansion_factor")
    kernel = reader.integer("conv_kernel_size")
    table.norm("conv.norm", size)
    table.convolution("conv.up_conv", size, 2 * inner_size, 1)
    table.convolution(
        "conv.depth_conv", inner_size, inner_size, kernel, groups=inner_size, bias=False
    )
    table.norm("conv.batch_norm", inner_size)
    table.convolution("conv.down_conv", inner_size, size, 1)


def gemma4_sound(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Gemma 4's Conformer: linear layers without bias, RMS norms, relative positions."""
    size, outputs = reader.integer("hidden_size"), reader.integer("output_proj_dims")
    _gemma4_stem(table, name, reader, size)
    heads = reader.integer("num_attention_heads")
    head_size = reader.divide("hidden_size", size, "num_attention_heads", heads)
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers")):
        for half in ("feed_forward1", "feed_forward2"):
            perceptron(table, half, size, GEMMA4_WIDENING * size, bias=False)
            table.norm(f"{half}.pre_layer_norm", size, bias=False)
            table.norm(f"{half}.post_layer_norm", size, bias=False)
        for projection in ("q_proj", "k_proj", "v_proj", "post", "relative_k_proj"):
            table.linear(f"self_attn.{projection}", size, size, bias=False)
        table.parameter("self_attn", "per_dim_scale", head_size)
        table.linear("lconv1d.linear_start", size, 2 * size, bias=False)
        kernel = reader.integer("conv_kernel_size")
        table.convolution("lconv1d.depthwise_conv1d", size, size, kernel, groups=size, bias=False)
        table.linear("lconv1d.linear_end", size, size, bias=False)
        for place in ("lconv1d.pre_layer", "lconv1d.conv", "pre_attn", "post_attn", "out"):
            table.norm(f"{place}_norm", size, bias=False)
    with table.block(f"{name}.projection"):
        table.linear("output_proj", size, outputs)


GEMMA4_WIDENING = 4
"""How many times wider the feed-forward networks are (``Gemma4AudioFeedForward``)."""


def _gemma4_stem(table: ParameterTable, name: str, reader: ConfigReader, size: int) -> None:
    channels = reader.integers("subsampling_conv_channels", minimum=1)
    if len(channels) != 2:
        error = reader.fail("subsampling_conv_channels", f"expected two, got {len(channels)}")
        raise error
    first, second = channels
    with table.block(f"{name}.stem"):
        for number, (inputs, outputs) in enumerate(((1, first), (first, second))):
            table.convolution(f"layer{number}.conv", inputs, outputs, CUBE, CUBE, bias=False)
            table.norm(f"layer{number}.norm", outputs, bias=False)
        table.linear("input_proj_linear", first // 4 * second, size, bias=False)
