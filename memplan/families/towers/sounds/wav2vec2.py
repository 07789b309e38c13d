"""wav2vec 2.0 and its kin: convolutions of the signal, then a transformer or a Conformer."""

from memplan.families.towers.layers import encoder_attention, perceptron, tower_activation
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import at_least_one, each_stage
from memplan.families.towers.sounds.conformer import conformer_layer, declare_conformer
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.conformer import Distances, DistanceTablesBody
from memplan.model.towers.layers import BiasedHeads, LayerBody, LayerNames
from memplan.model.towers.parts import NormBody
from memplan.model.towers.sounds import (
    PositionConvolutionBody,
    ProjectedFramesBody,
    SignalBody,
    SignalNorm,
)
from memplan.model.towers.speech import CollectedBody, DistancesBody, StackedPositionsBody

SECONDS = 30
"""How long clips are cut where the setup says nothing else."""
SAMPLING_RATE = 16000
"""Samples a second of every published model of the family."""

GATE_WIDTH = 8
"""Outputs of the gate on WavLM's position bias (``WavLMAttention``)."""
MASK_PROBABILITY = 0.05
"""Of a stretch of time, in every class of the family; a model that masks owns a mask embedding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wav2Vec2Kind:
    """How a type differs."""

    layer_normed: bool = False
    """Each convolution of the signal has a layer norm, whatever the config says (data2vec)."""
    stacked_positions: bool = False
    """Positions pass several plain convolutions, not a single one with weight norm (data2vec)."""
    projection_norm_optional: bool = False
    """``feat_proj_layer_norm`` can leave out the norm before the projection (HuBERT)."""
    relative_bias: bool = False
    """Gated position biases, a table of them in the first layer (WavLM)."""
    conformer: bool = False
    always_masks: bool = False
    """The mask embedding is there whatever the probabilities are (UniSpeech-SAT)."""
    adapts: bool = True
    """The class can have an adapter behind the encoder (``add_adapter``)."""


WAV2VEC2_KINDS: dict[str, Wav2Vec2Kind] = {
    "wav2vec2": Wav2Vec2Kind(),
    "hubert": Wav2Vec2Kind(projection_norm_optional=True, adapts=False),
    "wavlm": Wav2Vec2Kind(relative_bias=True),
    "data2vec-audio": Wav2Vec2Kind(layer_normed=True, stacked_positions=True),
    "unispeech": Wav2Vec2Kind(adapts=False),
    "unispeech-sat": Wav2Vec2Kind(always_masks=True, adapts=False),
    "wav2vec2-conformer": Wav2Vec2Kind(conformer=True),
}


def wav2vec2_tower(
    table: ParameterTable, name: str, reader: ConfigReader, kind: Wav2Vec2Kind
) -> None:
    """The bare model."""
    features = signal_convolutions(table, name, reader, kind)
    size = reader.integer("hidden_size")
    normed = not kind.projection_norm_optional or reader.flag("feat_proj_layer_norm", default=True)
    projected = ProjectedFramesBody(
        features=features, size=size, norm="layer_norm" if normed else "",
        dropout=reader.number("feat_proj_dropout", default=0.0),
        mask=time_mask(reader), returned=not kind.projection_norm_optional,
    )  # fmt: skip
    with table.block(f"{name}.feature_projection", body=projected):
        if normed:
            table.norm("layer_norm", features)
        table.linear("projection", features, size)
        if kind.always_masks or masks(reader):
            table.parameter("model", "masked_spec_embed", size)
    if kind.conformer:
        _conformer(table, name, reader, kind, size)
    else:
        _encoder(table, name, reader, kind, size)
    if kind.adapts and reader.flag("add_adapter"):
        _adapter(table, name, reader)


def _conformer(
    table: ParameterTable, name: str, reader: ConfigReader, kind: Wav2Vec2Kind, size: int
) -> None:
    """``Wav2Vec2ConformerEncoder``, which owns a convolution for positions and never runs it."""
    known = (Distances.SINES, Distances.ROTARY)
    body = conformer_layer(reader, known)
    tables = DistanceTablesBody(
        size=size, head_dim=size // body.num_heads, distances=body.distances,
        positions=reader.integer("max_source_positions"), dropout=body.dropout,
        before="pos_conv_embed",
    )  # fmt: skip
    with table.block(f"{name}.encoder.embed", body=tables):
        declare_positions(table, reader, kind, size)
        if weighs_layers(reader):
            table.computes(ChainBody(parts=(tables, CollectedBody())))
    count = reader.layers("num_hidden_layers")
    declare_conformer(table, f"{name}.encoder.layers", count, reader, body)
    with table.block(f"{name}.encoder.norm", body=NormBody(module="layer_norm", size=size)):
        table.norm("layer_norm", size)


def _encoder(
    table: ParameterTable, name: str, reader: ConfigReader, kind: Wav2Vec2Kind, size: int
) -> None:
    """``Wav2Vec2Encoder``, or the one with its norms before (``StableLayerNorm``)."""
    written = _is_written(reader, kind)
    stable = reader.flag("do_stable_layer_norm")
    placed = _position_body(reader, size, kind)
    with table.block(f"{name}.encoder.embed"):
        declare_positions(table, reader, kind, size)
        table.computes(_before_layers(table, reader, kind, placed) if stable else placed)
    drop = reader.number("hidden_dropout", default=0.0)
    first = NormBody(module="layer_norm", size=size, dropout=drop)
    if not stable:
        with table.block(f"{name}.encoder.norm"):
            table.norm("layer_norm", size)
            table.computes(_before_layers(table, reader, kind, first))
    body = _layer_body(reader, size, kind, stable=stable) if written else None
    with table.block(f"{name}.encoder.layers", count=reader.layers("num_hidden_layers"), body=body):
        _layer(table, reader, kind)
    if stable:
        last = NormBody(module="layer_norm", size=size)
        with table.block(f"{name}.encoder.norm", body=last if written else None):
            table.norm("layer_norm", size)


def _before_layers(
    table: ParameterTable, reader: ConfigReader, kind: Wav2Vec2Kind, body: TowerBody
) -> TowerBody:
    """What stands before the layers, and the numbers of distances that all of them read."""
    parts: tuple[TowerBody, ...] = (body,)
    if kind.relative_bias:
        heads = reader.integer("num_attention_heads")
        table.embedding("attn.rel_attn_embed", reader.integer("num_buckets"), heads)
        parts += (DistancesBody(table="attn.rel_attn_embed", num_heads=heads),)
    if weighs_layers(reader):
        parts += (CollectedBody(),)
    return body if len(parts) == 1 else ChainBody(parts=parts)


def weighs_layers(reader: ConfigReader) -> bool:
    """Whether a head reads all layers' results; the class for transcripts has none that does."""
    return reader.flag("use_weighted_layer_sum") and not any(
        each.endswith(("ForCTC", "Model")) for each in reader.texts("architectures")
    )


def _is_written(reader: ConfigReader, kind: Wav2Vec2Kind) -> bool:
    """Whether the operations of the type's encoder are written down."""
    batch_norm = kind.projection_norm_optional and reader.flag("conv_pos_batch_norm")
    return not (batch_norm or reader.optional_integer("adapter_attn_dim"))


def _position_body(
    reader: ConfigReader, size: int, kind: Wav2Vec2Kind
) -> PositionConvolutionBody | StackedPositionsBody:
    stable = reader.flag("do_stable_layer_norm")
    if kind.stacked_positions:
        return StackedPositionsBody(
            size=size, kernel=reader.integer("conv_pos_kernel_size"),
            activation=tower_activation(reader, "feat_extract_activation"),
            modules=_stacked(reader),
        )  # fmt: skip
    return PositionConvolutionBody(
        size=size, kernel=reader.integer("num_conv_pos_embeddings"),
        groups=reader.integer("num_conv_pos_embedding_groups"),
        activation=tower_activation(reader, "feat_extract_activation"),
        dropout=reader.number("hidden_dropout", default=0.0) if stable else 0.0,
    )  # fmt: skip


def _layer_body(reader: ConfigReader, size: int, kind: Wav2Vec2Kind, *, stable: bool) -> LayerBody:
    """``Wav2Vec2EncoderLayer``, or the one with its norms before (``StableLayerNorm``)."""
    drop = reader.number("hidden_dropout", default=0.0)
    attention = encoder_attention(
        reader, size, dropout=reader.number("attention_dropout", default=0.0), fp32_softmax=False
    )
    names = LayerNames(
        attention="attn", output="o_proj", first_norm="layer_norm", second_norm="final_layer_norm",
        network="feed_forward",
    )  # fmt: skip
    return LayerBody(
        size=size, inner_size=reader.integer("intermediate_size"), attention=attention,
        activation=tower_activation(reader, "hidden_act"), dropout=drop,
        activation_dropout=reader.number("activation_dropout", default=0.0),
        norms_last=not stable, names=names,
        heads=_GATED if kind.relative_bias else None,
    )  # fmt: skip


_GATED = BiasedHeads(
    gate="attn.gru_rel_pos_linear", outputs=GATE_WIDTH, factor="attn.gru_rel_pos_const"
)


def time_mask(reader: ConfigReader) -> str:
    """The vector that overwrites masked stretches of time in training; empty: none are masked."""
    masked = reader.flag("apply_spec_augment", default=True) and reader.number(
        "mask_time_prob", default=MASK_PROBABILITY
    )
    return "model.masked_spec_embed" if masked else ""


def masks(reader: ConfigReader) -> bool:
    """Whether the model owns an embedding for masked stretches."""
    in_time = reader.number("mask_time_prob", default=MASK_PROBABILITY)
    return in_time > 0 or reader.number("mask_feature_prob") > 0


def signal_convolutions(
    table: ParameterTable, name: str, reader: ConfigReader, kind: Wav2Vec2Kind
) -> int:
    """``feature_extractor``; gives the channels that come out."""
    channels = at_least_one(reader, "conv_dim")
    kernels = each_stage(reader, "conv_kernel", len(channels))
    norm = "layer" if kind.layer_normed else reader.text("feat_extract_norm", default="group")
    reader.choice("feat_extract_norm", norm, ("group", "layer"))
    bias = reader.flag("conv_bias")
    strides = each_stage(reader, "conv_stride", len(channels))
    activation = tower_activation(reader, "feat_extract_activation")
    before = 1
    for index, (after, kernel) in enumerate(zip(channels, kernels, strict=True)):
        normed = SignalNorm.LAYER if norm == "layer" else SignalNorm.NONE
        body = SignalBody(
            module="conv", kernel=kernel, stride=strides[index], activation=activation, bias=bias,
            norm=normed if index or norm == "layer" else SignalNorm.GROUP, norm_module="layer_norm",
            channels=0 if index else 1, length=0 if index else SECONDS * SAMPLING_RATE, leaf=True,
            last=index == len(channels) - 1,
            rate=SAMPLING_RATE, recomputed=True,
        )  # fmt: skip
        with table.block(f"{name}.feature_extractor.{index}", body=body):
            table.convolution("conv", before, after, kernel, bias=bias)
            if norm == "layer" or not index:
                table.norm("layer_norm", after)
        before = after
    return before


def declare_positions(
    table: ParameterTable, reader: ConfigReader, kind: Wav2Vec2Kind, size: int
) -> None:
    """A grouped convolution; its weight norm owns a length for each tap beside the direction."""
    groups = reader.integer("num_conv_pos_embedding_groups")
    reader.divide("hidden_size", size, "num_conv_pos_embedding_groups", groups)
    if kind.stacked_positions:
        kernel = reader.integer("conv_pos_kernel_size")
        for module in _stacked(reader):
            table.convolution(module, size, size, kernel, groups=groups)
        return
    count = reader.integer("num_conv_pos_embeddings")
    if kind.projection_norm_optional and reader.flag("conv_pos_batch_norm"):
        table.norm("pos_conv_embed.batch_norm", size)
        table.convolution("pos_conv_embed.conv", size, size, count, groups=groups)
        return
    table.parameter("pos_conv_embed.conv", "bias", size)
    table.parameter("pos_conv_embed.weight_norm", "original0", 1, 1, count)
    table.parameter("pos_conv_embed.weight_norm", "original1", size, size // groups, count)


def _stacked(reader: ConfigReader) -> tuple[str, ...]:
    """The convolutions of stacked positions."""
    count = reader.layers("num_conv_pos_embeddings")
    return tuple(f"pos_conv_embed.layers.{index}.conv" for index in range(count))


def _layer(table: ParameterTable, reader: ConfigReader, kind: Wav2Vec2Kind) -> None:
    size = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    head_dim = reader.divide("hidden_size", size, "num_attention_heads", heads)
    attention(table, "attn", size)
    table.norm("layer_norm", size)
    perceptron(table, "feed_forward", size, reader.integer("intermediate_size"))
    table.norm("final_layer_norm", size)
    if kind.relative_bias:
        table.parameter("attn", "gru_rel_pos_const", 1, heads, 1, 1)
        table.linear("attn.gru_rel_pos_linear", head_dim, GATE_WIDTH)
    narrow = reader.optional_integer("adapter_attn_dim")
    if narrow and reader.flag("do_stable_layer_norm"):
        table.norm("adapter_layer.norm", size)
        table.linear("adapter_layer.linear_1", size, narrow)
        table.linear("adapter_layer.linear_2", narrow, size)


def output_size(reader: ConfigReader) -> int:
    """Width behind an adapter, where there is one."""
    size = reader.integer("hidden_size")
    return reader.integer("output_hidden_size", default=size)


def adapter_projection(table: ParameterTable, reader: ConfigReader) -> None:
    """A linear layer and a norm, where an adapter changes the width."""
    size, out = reader.integer("hidden_size"), output_size(reader)
    if out != size:
        table.linear("adapter.proj", size, out)
        table.norm("adapter.proj_layer_norm", out)


def _adapter(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``Wav2Vec2Adapter``: convolutions to twice the width, half of which gates the other."""
    out, kernel = output_size(reader), reader.integer("adapter_kernel_size")
    with table.block(f"{name}.adapter"):
        adapter_projection(table, reader)
    with table.block(f"{name}.adapter.layers", count=reader.layers("num_adapter_layers")):
        table.convolution("conv", out, 2 * out, kernel)
