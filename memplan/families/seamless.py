"""SeamlessM4T, both versions: translation between speech and text, counted.

Each class takes some of five parts: a text encoder, a speech encoder (Conformer), a text decoder, a
model from text to units of speech, and a vocoder. The base model has them all.
"""

from memplan.families.counted import attention, counted_model, feed_forward, shared_table
from memplan.families.request import ReadRequest, reject_task
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

VERSION_TWO = "seamless_m4t_v2"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of either version; the first architecture says what comes in and goes out."""
    task = reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE, Task.OTHER)
    hidden, second = reader.integer("hidden_size"), request.model_type == VERSION_TWO
    speech_in = any("ForSpeechTo" in each for each in reader.texts("architectures"))
    tied = reader.flag("tie_word_embeddings", default=True)

    def declare(table: ParameterTable, task: Task) -> None:
        everything = task is Task.BASE
        stacks = ("encoder", "decoder") if everything or not speech_in else ("decoder",)
        shared_table(table, reader.integer("vocab_size"), hidden, stacks, tied=tied)
        if everything or not speech_in:
            _stack(table, reader, "encoder", hidden)
        if everything or speech_in:
            _speech_encoder(table, reader, hidden)
        _stack(table, reader, "decoder", hidden)
        with table.block("head"):
            table.tied("lm_head", "shared.weight", reader.integer("vocab_size"), hidden)
        if everything or task is Task.OTHER:
            _units(table, reader, hidden, second=second)
            _vocoder(table, reader)

    return counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"), hidden_size=hidden,
        context_length=reader.integer("max_position_embeddings"),
        tied=tied,
    )  # fmt: skip


def _stack(
    table: ParameterTable, reader: ConfigReader, name: str, hidden: int, prefix: str = ""
) -> None:
    """A text encoder or decoder: norms before, one more behind; positions are sinusoids."""
    with table.block(f"{prefix}{name}.layers", count=reader.layers(f"{prefix}{name}_layers")):
        _layer(table, hidden, reader.integer(f"{prefix}{name}_ffn_dim"), crossed=name == "decoder")
    with table.block(f"{prefix}{name}.norm"):
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
    features = reader.integer("feature_projection_input_dim")
    inner = reader.integer("speech_encoder_intermediate_size")
    with table.block("speech_encoder.embed"):
        table.norm("feature_norm", features)
        table.linear("feature_projection", features, hidden)
    with table.block("speech_encoder.layers", count=reader.layers("speech_encoder_layers")):
        _conformer_layer(table, reader, hidden, inner)
    with table.block("speech_encoder.adapter", count=_adapters(reader)):
        _adapter_layer(table, hidden, inner, reader.integer("adaptor_kernel_size"))
    with table.block("speech_encoder.norm"):
        table.norm("encoder_layer_norm", hidden)
        feed_forward(table, hidden, inner, name="intermediate_ffn")
        table.norm("inner_layer_norm", hidden)


def _adapters(reader: ConfigReader) -> int:
    return reader.layers("num_adapter_layers") if reader.flag("add_adapter") else 0


def _conformer_layer(table: ParameterTable, reader: ConfigReader, hidden: int, inner: int) -> None:
    """Half a feed-forward, attention, a convolution, the other half; a norm for each."""
    for name in ("ffn1", "ffn2"):
        table.norm(f"{name}_layer_norm", hidden)
        feed_forward(table, hidden, inner, name=name)
    table.norm("self_attn_layer_norm", hidden)
    attention(table, "self_attn", hidden)
    _relative_positions(table, reader, hidden)
    kernel = reader.integer("conv_depthwise_kernel_size")
    table.norm("conv.norm", hidden)
    table.convolution("conv.pointwise1", hidden, 2 * hidden, 1, bias=False)
    table.convolution("conv.depthwise", hidden, hidden, kernel, groups=hidden, bias=False)
    table.norm("conv.depthwise_norm", hidden)
    table.convolution("conv.pointwise2", hidden, hidden, 1, bias=False)
    table.norm("final_layer_norm", hidden)


def _relative_positions(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    """``relative`` is Transformer-XL's, ``relative_key`` a table of distances in each layer."""
    heads = reader.integer("speech_encoder_attention_heads")
    head_dim = reader.divide("hidden_size", hidden, "speech_encoder_attention_heads", heads)
    kind = reader.text("position_embeddings_type")
    if kind == "relative":
        table.linear("self_attn.linear_pos", hidden, hidden, bias=False)
        for name in ("pos_bias_u", "pos_bias_v"):
            table.parameter("self_attn", name, heads, head_dim)
    elif kind == "relative_key":
        left, right = (
            reader.integer(f"{side}_max_position_embeddings") for side in ("left", "right")
        )
        table.embedding("self_attn.distances", left + right + 1, head_dim)


def _adapter_layer(table: ParameterTable, hidden: int, inner: int, kernel: int) -> None:
    """Two gated convolutions shorten the sequence, for the residual and for attention."""
    for name in ("residual", "self_attn"):
        table.norm(f"{name}_layer_norm", hidden)
        table.convolution(f"{name}_conv", hidden, 2 * hidden, kernel)
    attention(table, "self_attn", hidden)
    table.norm("final_layer_norm", hidden)
    feed_forward(table, hidden, inner)


def _units(table: ParameterTable, reader: ConfigReader, hidden: int, *, second: bool) -> None:
    """From text to units, with an output matrix of its own where nothing is tied."""
    if not reader.flag("tie_word_embeddings", default=True):
        with table.block("t2u.head"):
            table.linear("t2u.lm_head", hidden, reader.integer("t2u_vocab_size"), bias=False)
    _stack(table, reader, "encoder", hidden, prefix="t2u_")
    with table.block("t2u_decoder.embed"):
        table.embedding("t2u.embed_tokens", reader.integer("t2u_vocab_size"), hidden)
        if second:
            table.embedding("t2u.embed_char", reader.integer("char_vocab_size"), hidden)
            table.parameter("t2u", "pos_emb_alpha_char", 1)
            table.parameter("t2u", "pos_emb_alpha", 1)
    if not second:
        _stack(table, reader, "decoder", hidden, prefix="t2u_")
        return
    with table.block("t2u_decoder.layers", count=reader.layers("t2u_decoder_layers")):
        attention(table, "self_attn", hidden)
        table.norm("self_attn_layer_norm", hidden)
        for name in ("conv1", "conv2"):
            table.convolution(name, hidden, hidden, UNIT_KERNEL)
        table.norm("conv_layer_norm", hidden)
    with table.block("t2u_decoder.norm"):
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
    with table.block("vocoder.embed"):
        table.embedding("unit_embedding", reader.integer("unit_hifi_gan_vocab_size"), units)
        table.embedding("speaker_embedding", reader.integer("vocoder_num_spkrs"), speaker)
        table.embedding("language_embedding", reader.integer("vocoder_num_langs"), language)
    with table.block("vocoder"):
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
