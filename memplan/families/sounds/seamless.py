"""SeamlessM4T, both versions: translation between speech and text.

What they compute on the way to text is written down, since that alone has a loss.

Each class takes some of five parts: a text encoder, a speech encoder (Conformer), a text decoder, a
model from text to units of speech, and a vocoder. The base model has them all.
"""

from dataclasses import replace

from memplan.families.counted import attention, counted_model, feed_forward
from memplan.families.request import ReadRequest, reject_task
from memplan.families.towers.layers import perceptron, tower_activation
from memplan.families.towers.sounds.conformer import (
    declare_adapter,
    declare_conformer,
    distances_of,
)
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task
from memplan.model.towers.body import ChainBody
from memplan.model.towers.conformer import (
    AttentiveAdapterBody,
    ConformerLayerBody,
    Distances,
    DistanceTablesBody,
    HalfNetworkBody,
)
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.parts import NormBody, SpareBody
from memplan.model.towers.sounds import FeaturesBody, ProjectedFramesBody
from memplan.model.towers.texts import OutputBody, TargetsBody

VERSION_TWO = "seamless_m4t_v2"
SPARE = SpareBody()


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of either version; the first architecture says what comes in and goes out."""
    task = reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE, Task.OTHER)
    hidden, second = reader.integer("hidden_size"), request.model_type == VERSION_TWO
    speech_in = any("ForSpeechTo" in each for each in reader.texts("architectures"))
    tied = reader.flag("tie_word_embeddings", default=True)

    def declare(table: ParameterTable, task: Task) -> None:
        _translation(table, reader, task, hidden, hears=task is Task.BASE or speech_in)
        if task is not Task.SEQ2SEQ_LM:
            # They run at most when it generates.
            _units(table, reader, hidden, second=second)
            _vocoder(table, reader)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"), hidden_size=hidden,
        context_length=reader.integer("max_position_embeddings"),
        tied=tied,
    )  # fmt: skip


def _translation(
    table: ParameterTable, reader: ConfigReader, task: Task, hidden: int, *, hears: bool
) -> None:
    """From speech or text to text; the base model has both encoders, and hears here."""
    rows, tied = reader.integer("vocab_size"), reader.flag("tie_word_embeddings", default=True)
    source = _Text(reader=reader, hidden=hidden, rows=rows, tied=tied)
    if not hears or task is Task.BASE:
        source.declare(table, "encoder", spare=hears)
    if hears:
        _speech_encoder(table, reader, hidden)
    source.declare(table, "decoder", behind="speech_encoder" if hears else "encoder")
    with table.block("head", body=OutputBody(size=hidden, rows=rows, table="shared.weight")):
        table.tied("lm_head", "shared.weight", rows, hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """What the text encoder and the text decoder have in common."""

    reader: ConfigReader
    hidden: int
    rows: int
    tied: bool

    def declare(
        self, table: ParameterTable, name: str, *, behind: str = "", spare: bool = False
    ) -> None:
        """One of them; the first that is declared owns the table that all share."""
        reader, hidden, tokens = self.reader, self.hidden, f"{name}.embed_tokens"
        body = TargetsBody(
            size=hidden, num_positions=reader.integer("max_position_embeddings") + SINES_OFFSET,
            tokens=tokens, sines=True, scaled=True, source=not behind,
            dropout=reader.number("dropout", default=0.0),
        )  # fmt: skip
        first = not any(
            each.module == "shared" for block in table.blocks() for each in block.parameters
        )
        with table.block(f"{name}.embed", body=SPARE if spare else body):
            if first:
                table.embedding("shared", self.rows, hidden, unused=not self.tied)
            if self.tied:
                table.tied(tokens, "shared.weight", self.rows, hidden)
            else:
                table.embedding(tokens, self.rows, hidden)
        layer = _text_layer(reader, name, hidden, behind)
        _stack(table, reader, name, hidden, body=SPARE if spare else layer)


SINES_OFFSET = 2
"""Rows that the buffer of sines has beyond the positions (``SeamlessM4TSinusoidalPositionalEmbedding``)."""
_NAMES = LayerNames(
    output="o_proj", first_norm="self_attn_layer_norm", second_norm="final_layer_norm",
    up="up_proj", down="down_proj",
)  # fmt: skip


def _text_layer(reader: ConfigReader, name: str, hidden: int, behind: str) -> LayerBody:
    """``SeamlessM4TEncoderLayer``, or, ``behind`` an encoder, the decoder's: BART's, norms before."""
    key = f"{name}_attention_heads"
    heads = reader.integer(key)
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads,
        head_dim=reader.divide("hidden_size", hidden, key, heads),
        query_bias=True, key_bias=True, value_bias=True, output_bias=True, causal=bool(behind),
        fp32_softmax=False, dropout=reader.number("attention_dropout", default=0.0),
        names_weights=True,
    )  # fmt: skip
    inner_drop = reader.number("activation_dropout", default=0.0)
    return LayerBody(
        size=hidden, inner_size=reader.integer(f"{name}_ffn_dim"), attention=attention,
        activation=tower_activation(reader, "activation_function", default="relu"),
        dropout=reader.number("dropout", default=0.0), activation_dropout=inner_drop,
        network_dropout=inner_drop, widened=True,
        cross_attention=replace(attention, causal=False) if behind else None, memory=behind,
        names=_NAMES,
    )  # fmt: skip


def _stack(
    table: ParameterTable,
    reader: ConfigReader,
    name: str,
    hidden: int,
    prefix: str = "",
    *,
    body: LayerBody | SpareBody = SPARE,
) -> None:
    """A text encoder or decoder: norms before, one more behind; positions are sinusoids."""
    count = reader.layers(f"{prefix}{name}_layers")
    with table.block(f"{prefix}{name}.layers", count=count, body=body):
        _layer(table, hidden, reader.integer(f"{prefix}{name}_ffn_dim"), crossed=name == "decoder")
    last = NormBody(module="layer_norm", size=hidden)
    with table.block(f"{prefix}{name}.norm", body=last if isinstance(body, LayerBody) else SPARE):
        table.norm("layer_norm", hidden)


def _layer(table: ParameterTable, hidden: int, inner: int, *, crossed: bool) -> None:
    attention(table, "self_attn", hidden)
    table.norm("self_attn_layer_norm", hidden)
    if crossed:
        attention(table, "cross_attn", hidden)
        table.norm("cross_attn_layer_norm", hidden)
    feed_forward(table, hidden, inner)
    table.norm("final_layer_norm", hidden)


def _speech_encoder(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    """``SeamlessM4TSpeechEncoder``: a Conformer, half a network, perhaps adapters, a norm."""
    features = reader.integer("feature_projection_input_dim")
    drop = reader.number("speech_encoder_dropout", default=0.0)
    second = reader.text("model_type") == VERSION_TWO
    body = _conformer(reader, hidden, drop, second=second)
    given = FeaturesBody(features=features, length=SECONDS * FRAMES, rate=FRAMES)
    projected = ProjectedFramesBody(
        features=features, size=hidden, norm="feature_norm", linear="feature_projection",
        dropout=drop,
    )  # fmt: skip
    tables = DistanceTablesBody(
        size=hidden, head_dim=hidden // body.num_heads, distances=body.distances, dropout=drop,
        positions=reader.integer("max_source_positions", default=1),
        chunked=second and reader.optional_integer("speech_encoder_chunk_size") is not None,
    )  # fmt: skip
    with table.block("speech_encoder.embed", body=ChainBody(parts=(given, projected, tables))):
        table.norm("feature_norm", features)
        table.linear("feature_projection", features, hidden)
    count = reader.layers("speech_encoder_layers")
    declare_conformer(table, "speech_encoder.layers", count, reader, body)
    norm = NormBody(module="encoder_layer_norm", size=hidden)
    half = HalfNetworkBody(
        module="intermediate_ffn", size=hidden, inner_size=body.inner_size,
        activation=Activation.RELU,
    )  # fmt: skip
    with table.block("speech_encoder.middle", body=ChainBody(parts=(norm, half))):
        table.norm("encoder_layer_norm", hidden)
        perceptron(table, "intermediate_ffn", hidden, body.inner_size)
    if reader.flag("add_adapter"):
        _adapter(table, reader, body, drop)
    last = NormBody(module="inner_layer_norm", size=hidden)
    with table.block("speech_encoder.norm", body=last):
        table.norm("inner_layer_norm", hidden)


FRAMES = 50
"""Rows of filter banks a second (``SeamlessM4TFeatureExtractor``)."""
SECONDS = 30
"""How long clips are cut where the setup says nothing else."""


def _conformer(
    reader: ConfigReader, hidden: int, drop: float, *, second: bool
) -> ConformerLayerBody:
    """The second version's convolutions see what was before alone."""
    known = (Distances.TABLE,) if second else (Distances.SINES, Distances.ROTARY)
    heads = reader.integer("speech_encoder_attention_heads")
    reader.divide("hidden_size", hidden, "speech_encoder_attention_heads", heads)
    return ConformerLayerBody(
        size=hidden, inner_size=reader.integer("speech_encoder_intermediate_size"),
        num_heads=heads, activation=tower_activation(reader, "speech_encoder_hidden_act"),
        distances=distances_of(reader, known), kernel=reader.integer("conv_depthwise_kernel_size"),
        causal=second, names_distances=second, dropout=drop, activation_dropout=drop, attention_dropout=drop,
        convolution_dropout=drop,
    )  # fmt: skip


def _adapter(
    table: ParameterTable, reader: ConfigReader, body: ConformerLayerBody, drop: float
) -> None:
    """Two gated convolutions shorten the sequence, for the residual and for attention."""
    own = reader.number("adaptor_dropout", default=0.0)
    adapter = AttentiveAdapterBody(
        size=body.size, inner_size=body.inner_size, num_heads=body.num_heads,
        kernel=reader.integer("adaptor_kernel_size"), stride=reader.integer("adaptor_stride"),
        activation=Activation.RELU, dropout=own, activation_dropout=own, attention_dropout=drop,
        result_dropout=own,
    )  # fmt: skip
    count = reader.layers("num_adapter_layers")
    declare_adapter(table, "speech_encoder.adapter.layers", count, adapter)


def _units(
    table: ParameterTable,
    reader: ConfigReader,
    hidden: int,
    *,
    second: bool,
) -> None:
    """From text to units, with an output matrix of its own where nothing is tied."""
    if not reader.flag("tie_word_embeddings", default=True):
        with table.block("t2u.head", body=SPARE):
            table.linear("t2u.lm_head", hidden, reader.integer("t2u_vocab_size"), bias=False)
    _stack(table, reader, "encoder", hidden, prefix="t2u_")
    with table.block("t2u_decoder.embed", body=SPARE):
        table.embedding("t2u.embed_tokens", reader.integer("t2u_vocab_size"), hidden)
        if second:
            table.embedding("t2u.embed_char", reader.integer("char_vocab_size"), hidden)
            table.parameter("t2u", "pos_emb_alpha_char", 1)
            table.parameter("t2u", "pos_emb_alpha", 1)
    if not second:
        _stack(table, reader, "decoder", hidden, prefix="t2u_")
        return
    count = reader.layers("t2u_decoder_layers")
    with table.block("t2u_decoder.layers", count=count, body=SPARE):
        attention(table, "self_attn", hidden)
        table.norm("self_attn_layer_norm", hidden)
        for name in ("conv1", "conv2"):
            table.convolution(name, hidden, hidden, UNIT_KERNEL)
        table.norm("conv_layer_norm", hidden)
    with table.block("t2u_decoder.norm", body=SPARE):
        table.norm("layer_norm", hidden)
        inputs, width, kernel = (
            reader.integer(f"t2u_variance_predictor_{key}")
            for key in ("embed_dim", "hidden_dim", "kernel_size")
        )
        _duration_predictor(table, inputs, width, kernel)


UNIT_KERNEL = 7
"""Of the convolutions of version 2's unit decoder (``SeamlessM4Tv2TextToUnitDecoderLayer``)."""
DILATIONS: list[object] = [1, 3, 5]
"""Of each length of convolution, where the file does not say (the config class)."""
EDGE_KERNEL = 7
"""Of HiFi-GAN's first and last convolution (``SeamlessM4THifiGan``)."""


def _duration_predictor(table: ParameterTable, inputs: int, width: int, kernel: int) -> None:
    table.convolution("duration.conv1", inputs, width, kernel)
    table.norm("duration.norm1", width)
    table.convolution("duration.conv2", width, width, kernel)
    table.norm("duration.norm2", width)
    table.linear("duration.proj", width, 1)


def _vocoder(table: ParameterTable, reader: ConfigReader) -> None:
    """HiFi-GAN: units, speaker and language to a signal, upsampled step by step."""
    units = reader.integer("unit_embed_dim")
    speaker, language = reader.integer("spkr_embed_dim"), reader.integer("lang_embed_dim")
    with table.block("vocoder.embed", body=SPARE):
        table.embedding("unit_embedding", reader.integer("unit_hifi_gan_vocab_size"), units)
        table.embedding("speaker_embedding", reader.integer("vocoder_num_spkrs"), speaker)
        table.embedding("language_embedding", reader.integer("vocoder_num_langs"), language)
    with table.block("vocoder", body=SPARE):
        kernel = reader.integer("variance_predictor_kernel_size")
        _duration_predictor(table, units, units, kernel)
        channels = reader.integer("upsample_initial_channel")
        inputs = units + speaker + language
        table.convolution("conv_pre", inputs, channels, EDGE_KERNEL)
        for index, kernel in enumerate(reader.integers("upsample_kernel_sizes", minimum=1)):
            # A transposed convolution: as many weights, a bias for each output.
            table.parameter(f"upsampler.{index}", "weight", channels, channels // 2, kernel)
            table.parameter(f"upsampler.{index}", "bias", channels // 2)
            channels //= 2
            _residual_blocks(table, reader, f"resblocks.{index}", channels)
        table.convolution("conv_post", channels, 1, EDGE_KERNEL)


def _residual_blocks(table: ParameterTable, reader: ConfigReader, name: str, channels: int) -> None:
    """Two convolutions for each dilation, of several lengths side by side."""
    kernels = reader.integers("resblock_kernel_sizes", minimum=1)
    dilations = reader.sequence("resblock_dilation_sizes") or [DILATIONS] * len(kernels)
    if len(dilations) != len(kernels):
        key = "resblock_dilation_sizes"
        raise reader.fail(key, "needs one list for each kernel size")
    for place, (kernel, steps) in enumerate(zip(kernels, dilations, strict=True)):
        if not isinstance(steps, list):
            key = "resblock_dilation_sizes"
            raise reader.fail(key, "expected a list of lists")
        for index in range(2 * len(steps)):
            table.convolution(f"{name}.{place}.{index}", channels, channels, kernel)
