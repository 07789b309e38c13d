"""Whisper, Speech2Text, Moonshine and SpeechT5: speech in, text out, or the other way round.

Whisper says what it computes; the others are counted.
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.counted import attention, counted_model, feed_forward
from memplan.families.request import ReadRequest, reject_task
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sounds.wav2vec2 import (
    Wav2Vec2Kind,
    declare_positions,
    masks,
    signal_convolutions,
    time_mask,
)
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.distanced import DistancedLayerBody, PairVectorsBody, Place
from memplan.model.towers.gridded.nets import GroupNormBody
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.parts import NormBody
from memplan.model.towers.sounds import (
    FeaturesBody,
    FramesBody,
    GatedSignalBody,
    PositionConvolutionBody,
    ProjectedFramesBody,
    RowsBody,
    SignalBody,
    SinesBody,
)
from memplan.model.towers.texts import OutputBody, TargetsBody
from memplan.model.towers.turned import TurnedLayerBody, TurningTablesBody

TOKENS = "decoder.embed_tokens"
"""The token table, which the output matrix is tied to."""
Declare = Callable[[ParameterTable, ConfigReader, Task], None]


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``BODIES``."""
    body, context_key, tasks = BODIES[request.model_type]
    task = reject_task(reader, request, *tasks)

    def declare(table: ParameterTable, task: Task) -> None:
        body(table, reader, task)

    model = counted_model(
        reader, request, declare,
        task=task, vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("d_model", "hidden_size"),
        context_length=reader.integer(context_key),
        tied=reader.flag("tie_word_embeddings", default=True),
    )  # fmt: skip
    return replace(model, eager_attention_only=request.model_type in EAGER_ONLY)


EAGER_ONLY = frozenset({"speech_to_text", "speecht5"})
"""Types whose classes write their scores out, whatever kernel is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """An encoder or a decoder of BART's layers."""

    name: str
    num_layers: int
    hidden_size: int
    inner_size: int
    key_bias: bool = True


def _stack(reader: ConfigReader, name: str, *, key_bias: bool = True) -> Stack:
    hidden_size = reader.integer("d_model", "hidden_size")
    heads_key = f"{name}_attention_heads"
    reader.divide("d_model", hidden_size, heads_key, reader.integer(heads_key))
    return Stack(
        name=name,
        num_layers=reader.layers(f"{name}_layers"),
        hidden_size=hidden_size,
        inner_size=reader.integer(f"{name}_ffn_dim"),
        key_bias=key_bias,
    )


def declare_stack(
    table: ParameterTable,
    stack: Stack,
    *,
    final_norm: bool = True,
    body: LayerBody | DistancedLayerBody | None = None,
) -> None:
    """Self-attention, cross attention in a decoder, feed-forward; a norm for each."""
    hidden, key_bias = stack.hidden_size, stack.key_bias
    with table.block(f"{stack.name}.layers", count=stack.num_layers, body=body):
        attention(table, "self_attn", hidden, key_bias=key_bias)
        table.norm("self_attn_layer_norm", hidden)
        if stack.name.endswith("decoder"):
            attention(table, "cross_attn", hidden, key_bias=key_bias)
            table.norm("cross_attn_layer_norm", hidden)
        feed_forward(table, hidden, stack.inner_size)
        table.norm("final_layer_norm", hidden)
    norm = NormBody(module="layer_norm", size=hidden)
    with table.block(f"{stack.name}.norm", body=norm if body and final_norm else None):
        if final_norm:
            table.norm("layer_norm", hidden)


def _tokens(table: ParameterTable, reader: ConfigReader, hidden_size: int) -> None:
    table.embedding(TOKENS, reader.integer("vocab_size"), hidden_size)


def _output(
    table: ParameterTable,
    reader: ConfigReader,
    hidden_size: int,
    task: Task,
    body: OutputBody | None = None,
) -> None:
    if task is Task.SEQ2SEQ_LM:
        with table.block("head", body=body):
            rows = reader.integer("vocab_size")
            table.tied("lm_head", f"{TOKENS}.weight", rows, hidden_size)


# -- Whisper and Speech2Text -----------------------------------------------------------------------


def _whisper(table: ParameterTable, reader: ConfigReader, task: Task) -> None:
    """Two convolutions of length 3; the encoder's positions are sinusoids that are not trained."""
    encoder = _stack(reader, "encoder", key_bias=False)
    decoder = _stack(reader, "decoder", key_bias=False)
    hidden, drop = encoder.hidden_size, reader.number("dropout", default=0.0)
    positions, rows = reader.integer("max_target_positions"), reader.integer("vocab_size")
    declare_stem(table, "encoder.embed", reader, hidden)
    declare_stack(table, encoder, body=_whisper_layer(reader, encoder))
    tokens = TargetsBody(
        size=hidden, num_positions=positions, tokens=TOKENS, positions="embed_positions",
        dropout=drop,
    )  # fmt: skip
    with table.block("decoder.embed", body=tokens):
        _tokens(table, reader, hidden)
        table.embedding("embed_positions", positions, hidden)
    declare_stack(table, decoder, body=_whisper_layer(reader, decoder))
    output = OutputBody(size=hidden, rows=rows, table=f"{TOKENS}.weight")
    _output(table, reader, hidden, task, output)


def declare_stem(table: ParameterTable, name: str, reader: ConfigReader, hidden: int) -> None:
    """Two convolutions over the spectrum, the second of which halves it, and positions."""
    bins, rows = reader.integer("num_mel_bins"), reader.integer("max_source_positions")
    first = SignalBody(
        module="conv1", kernel=3, stride=1, padding=1, activation=Activation.GELU, channels=bins,
        length=2 * rows,
    )  # fmt: skip
    second = replace(first, module="conv2", stride=2, channels=0, length=0, last=True)
    drop = reader.number("dropout", default=0.0)
    frames = FramesBody(size=hidden, positions="embed_positions", dropout=drop)
    body = ChainBody(parts=(first, second, frames))
    with table.block(name, body=body):
        table.convolution("conv1", bins, hidden, 3)
        table.convolution("conv2", hidden, hidden, 3)
        table.untrained("embed_positions", "weight", rows, hidden)


_WHISPER_NAMES = LayerNames(
    output="o_proj", first_norm="self_attn_layer_norm", second_norm="final_layer_norm",
    up="up_proj", down="down_proj",
)  # fmt: skip


def _whisper_layer(reader: ConfigReader, stack: Stack) -> LayerBody:
    """``WhisperEncoderLayer`` and ``WhisperDecoderLayer``."""
    heads = reader.integer(f"{stack.name}_attention_heads")
    decoder = stack.name == "decoder"
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=stack.hidden_size // heads, query_bias=True,
        value_bias=True, output_bias=True, causal=decoder, fp32_softmax=False,
        dropout=reader.number("attention_dropout", default=0.0),
    )  # fmt: skip
    return LayerBody(
        size=stack.hidden_size, inner_size=stack.inner_size, attention=attention,
        activation=tower_activation(reader, "activation_function"),
        dropout=reader.number("dropout", default=0.0),
        activation_dropout=reader.number("activation_dropout", default=0.0),
        cross_attention=replace(attention, causal=False) if decoder else None,
        inline_network=True, memory="encoder" if decoder else "", copies_heads=True, names=_WHISPER_NAMES,
    )  # fmt: skip


def _speech_to_text(table: ParameterTable, reader: ConfigReader, task: Task) -> None:
    """Gated convolutions halve the signal; positions are sinusoids, and no parameters."""
    encoder, decoder = _stack(reader, "encoder"), _stack(reader, "decoder")
    hidden, middle = encoder.hidden_size, reader.integer("conv_channels")
    kernels = reader.integers("conv_kernel_sizes", minimum=1)
    if len(kernels) != reader.integer("num_conv_layers"):
        key = "conv_kernel_sizes"
        raise reader.fail(key, "must have num_conv_layers entries")
    inputs = reader.integer("input_feat_per_channel") * reader.integer("input_channels")
    drop, offset = reader.number("dropout", default=0.0), SINES_OFFSET
    parts: list[TowerBody] = [
        FeaturesBody(features=inputs, length=SECONDS * BANKS_A_SECOND, rate=BANKS_A_SECOND),
        RowsBody(),
        *(
            GatedSignalBody(module=f"conv.{index}", kernel=kernel, stride=2)
            for index, kernel in enumerate(kernels)
        ),
        RowsBody(),
        SinesBody(size=hidden, rows=reader.integer("max_source_positions") + offset, dropout=drop),
    ]  # fmt: skip
    with table.block("encoder.embed", body=ChainBody(parts=tuple(parts))):
        for index, kernel in enumerate(kernels):
            last = index == len(kernels) - 1
            table.convolution(f"conv.{index}", inputs, 2 * hidden if last else middle, kernel)
            inputs = middle // 2
    declare_stack(table, encoder, body=_plain_layer(reader, encoder))
    targets = TargetsBody(
        size=hidden, num_positions=reader.integer("max_target_positions") + offset, tokens=TOKENS,
        sines=True, scaled=True, dropout=drop,
    )  # fmt: skip
    with table.block("decoder.embed", body=targets):
        _tokens(table, reader, hidden)
    declare_stack(table, decoder, body=_plain_layer(reader, decoder))
    output = OutputBody(size=hidden, rows=reader.integer("vocab_size"), table=f"{TOKENS}.weight")
    _output(table, reader, hidden, task, output)


SINES_OFFSET = 2
"""Rows that the buffer of sines has beyond the positions (``Speech2TextSinusoidalPositionalEmbedding``)."""
BANKS_A_SECOND = 100
"""Filter banks of a clip, one every 10 milliseconds."""
SECONDS = 30
"""How long clips are cut where the setup says nothing else."""


def _plain_layer(reader: ConfigReader, stack: Stack) -> LayerBody:
    """BART's, norms before: keys have a bias, and heads are not copied."""
    whole = _whisper_layer(reader, stack)
    special = replace(whole.attention, key_bias=True)
    crossed = None if whole.cross_attention is None else replace(special, causal=False)
    return replace(whole, attention=special, cross_attention=crossed, copies_heads=False)


# -- Moonshine --------------------------------------------------------------------------------------


def _moonshine(table: ParameterTable, reader: ConfigReader, task: Task) -> None:
    """Three convolutions of the raw signal (``MoonshineEncoder``); only the decoder is gated."""
    hidden = reader.integer("hidden_size")
    first = SignalBody(
        module="conv1", kernel=127, stride=64, activation=Activation.TANH, bias=False, channels=1,
        length=SECONDS * SAMPLING_RATE, rate=SAMPLING_RATE,
    )  # fmt: skip
    second = SignalBody(module="conv2", kernel=7, stride=3, activation=Activation.GELU)
    parts: tuple[TowerBody, ...] = (
        first,
        GroupNormBody(module="groupnorm", groups=1),
        second,
        replace(second, module="conv3", kernel=3, stride=2, last=True),
        TurningTablesBody(dim=_turned_numbers(reader, hidden)),
    )
    with table.block("encoder.embed", body=ChainBody(parts=parts)):
        table.convolution("conv1", 1, hidden, 127, bias=False)
        table.convolution("conv2", hidden, 2 * hidden, 7)
        table.convolution("conv3", 2 * hidden, hidden, 3)
        table.norm("groupnorm", hidden)
    _moonshine_stack(table, reader, "encoder", hidden)
    targets = TargetsBody(
        size=hidden, num_positions=reader.integer("max_position_embeddings"), tokens=TOKENS,
        rotary_dim=_turned_numbers(reader, hidden),
    )  # fmt: skip
    with table.block("decoder.embed", body=targets):
        _tokens(table, reader, hidden)
    _moonshine_stack(table, reader, "decoder", hidden)
    output = OutputBody(
        size=hidden, rows=reader.integer("vocab_size"), table=f"{TOKENS}.weight", upcast=True
    )  # fmt: skip
    _output(table, reader, hidden, task, output)


SAMPLING_RATE = 16000
"""Samples a second of speech."""
TURNED_SHARE = 0.9
"""Of each head, where the file does not say (``MoonshineConfig``)."""


def _turned_numbers(reader: ConfigReader, hidden: int) -> int:
    """Numbers of each head that are turned by its position, in pairs."""
    from memplan.families.llama import rotated_dim  # only here

    head_dim = hidden // reader.integer("encoder_num_attention_heads")
    turned = rotated_dim(reader, head_dim, TURNED_SHARE)
    return turned + turned % 2


def _moonshine_stack(table: ParameterTable, reader: ConfigReader, name: str, hidden: int) -> None:
    """The encoder's layers overwrite the decoder's numbers of heads in the config that both share
    (``MoonshineAttention.__init__``), so that those in the file come to nothing."""
    heads_key = "encoder_num_attention_heads"
    num_heads = reader.integer(heads_key)
    head_dim = reader.divide("hidden_size", hidden, heads_key, num_heads)
    num_kv_heads = reader.integer("encoder_num_key_value_heads", default=num_heads)
    narrow, bias = num_kv_heads * head_dim, reader.flag("attention_bias")
    inner, decoder = reader.integer("intermediate_size"), name == "decoder"
    body = _moonshine_layer(reader, hidden, num_heads, num_kv_heads, decoder=decoder)
    count = reader.layers(f"{name}_num_hidden_layers")
    with table.block(f"{name}.layers", count=count, body=body):
        for part in ("self_attn", "cross_attn") if decoder else ("self_attn",):
            attention(table, part, hidden, key_value_width=narrow, bias=bias, output_bias=False)
            table.norm(f"{part}_layer_norm", hidden, bias=False)
        table.linear("mlp.fc1", hidden, 2 * inner if decoder else inner)
        table.linear("mlp.fc2", inner, hidden)
        table.norm("final_layer_norm", hidden, bias=False)
    last = NormBody(module="layer_norm", size=hidden, norm=NormSpec(kind=NormKind.LAYER))
    with table.block(f"{name}.norm", body=last):
        table.norm("layer_norm", hidden, bias=False)


def _moonshine_layer(
    reader: ConfigReader, hidden: int, num_heads: int, num_kv_heads: int, *, decoder: bool
) -> TurnedLayerBody:
    head_dim = hidden // num_heads
    multiple = reader.optional_integer("pad_head_dim_to_multiple_of") or 1
    turned = RotarySpec(dim=_turned_numbers(reader, hidden), expanded_tables=True, joined=True)
    bias = reader.flag("attention_bias")
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, query_bias=bias,
        key_bias=bias, value_bias=bias, causal=decoder, rotary=turned,
        dropout=reader.number("attention_dropout", default=0.0),
    )  # fmt: skip
    crossed = replace(attention, causal=False, rotary=None) if decoder else None
    key = "decoder_hidden_act" if decoder else "encoder_hidden_act"
    return TurnedLayerBody(
        size=hidden, inner_size=reader.integer("intermediate_size"), attention=attention,
        activation=tower_activation(reader, key), padding=-head_dim % multiple,
        cross_attention=crossed, memory="encoder" if decoder else "", gated=decoder,
    )  # fmt: skip


# -- SpeechT5 ---------------------------------------------------------------------------------------


def _speecht5(table: ParameterTable, reader: ConfigReader, task: Task) -> None:
    """One encoder and one decoder; what stands before and behind them depends on the class.

    The base model (``SpeechT5Model``) has nothing before or behind.
    """
    encoder, decoder = _stack(reader, "encoder"), _stack(reader, "decoder")
    hidden = encoder.hidden_size
    heads = reader.integer("encoder_attention_heads")
    text_in = task is Task.OTHER and not _hears(reader)
    before: tuple[TowerBody, ...] = ()
    if task is not Task.BASE and not text_in:
        before = _speech_features(table, reader, hidden)
    pairs = PairVectorsBody(
        size=hidden, norm="embed_norm", table="embed_positions", head_dim=hidden // heads,
        dropout=reader.number("hidden_dropout", default=0.0),
    )  # fmt: skip
    written = bool(before)
    chain = ChainBody(parts=(*before, pairs)) if before else None
    with table.block("encoder.embed", body=chain):
        if text_in:
            table.embedding("encoder.embed_tokens", reader.integer("vocab_size"), hidden)
            table.parameter("encode_positions", "alpha")
        elif task is not Task.BASE:
            declare_positions(table, reader, Wav2Vec2Kind(), hidden)
        rows = 2 * reader.integer("encoder_max_relative_position")
        table.embedding("embed_positions", rows, hidden // heads)
        table.norm("embed_norm", hidden)
    layer = _distanced_layer(reader, encoder)
    whole = encoder.num_layers
    counts = {Place.FIRST: min(1, whole - 1), Place.MIDDLE: max(0, whole - 2), Place.LAST: 1}
    for place, count in counts.items():
        part, body = replace(encoder, num_layers=count), replace(layer, place=place)
        declare_stack(table, part, final_norm=False, body=body)
    with table.block("encoder.norm", body=ChainBody(parts=())):
        pass
    targets = TargetsBody(
        size=hidden, num_positions=_sines(reader, "max_text_positions"), tokens=TOKENS, sines=True,
        in_place=True, scaled=True, dropout=reader.number("positional_dropout", default=0.0),
    )  # fmt: skip
    with table.block("decoder.embed", body=targets if task is Task.SEQ2SEQ_LM else None):
        if task is Task.SEQ2SEQ_LM:
            _tokens(table, reader, hidden)
        elif task is Task.OTHER:
            _spectrum_features(table, reader, hidden)
    declare_stack(table, decoder, final_norm=False, body=_distanced_layer(reader, decoder))
    if task is Task.OTHER:
        _spectrum(table, reader, hidden)
    output = OutputBody(size=hidden, rows=reader.integer("vocab_size"), table=f"{TOKENS}.weight")
    _output(table, reader, hidden, task, output if written else None)


def _sines(reader: ConfigReader, key: str) -> int:
    """Rows of the buffer of sines: for so many positions, for padding, and an offset."""
    padding = reader.integer("pad_token_id", default=1, minimum=0)
    return reader.integer(key) + padding + 1 + SINES_OFFSET


def _distanced_layer(reader: ConfigReader, stack: Stack) -> DistancedLayerBody:
    return DistancedLayerBody(
        size=stack.hidden_size, inner_size=stack.inner_size,
        num_heads=reader.integer(f"{stack.name}_attention_heads"),
        activation=tower_activation(reader, "hidden_act"),
        dropout=reader.number("hidden_dropout", default=0.0),
        activation_dropout=reader.number("activation_dropout", default=0.0),
        attention_dropout=reader.number("attention_dropout", default=0.0),
        memory="encoder" if stack.name == "decoder" else "",
    )  # fmt: skip


def _hears(reader: ConfigReader) -> bool:
    return any("ForSpeechTo" in each for each in reader.texts("architectures"))


def _speech_features(
    table: ParameterTable, reader: ConfigReader, hidden: int
) -> tuple[TowerBody, ...]:
    """wav2vec 2.0's convolutions and projection; gives what places the frames."""
    kind = Wav2Vec2Kind()
    features = signal_convolutions(table, "encoder", reader, kind)
    projected = ProjectedFramesBody(
        features=features, size=hidden, norm="feature_norm", linear="feature_projection",
        dropout=reader.number("feat_proj_dropout", default=0.0),
        mask="masked_spectrum.embedding" if time_mask(reader) else "",
    )  # fmt: skip
    with table.block("encoder.feature_projection", body=projected):
        table.norm("feature_norm", features)
        table.linear("feature_projection", features, hidden)
        if masks(reader):
            table.parameter("masked_spectrum", "embedding", hidden)
    convolved = PositionConvolutionBody(
        size=hidden, kernel=reader.integer("num_conv_pos_embeddings"),
        groups=reader.integer("num_conv_pos_embedding_groups"),
        activation=tower_activation(reader, "feat_extract_activation"),
    )  # fmt: skip
    placed = SinesBody(size=hidden, rows=_sines(reader, "max_speech_positions"), scaled=False)
    return convolved, placed


def _spectrum_features(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    """``SpeechT5SpeechDecoderPrenet``: a small network on each frame, and the speaker."""
    inputs, units = reader.integer("num_mel_bins"), reader.integer("speech_decoder_prenet_units")
    for index in range(reader.layers("speech_decoder_prenet_layers")):
        table.linear(f"prenet.{index}", inputs, units)
        inputs = units
    table.linear("prenet.final", units, hidden)
    table.parameter("encode_positions", "alpha")
    table.linear("speaker", reader.integer("speaker_embedding_dim") + hidden, hidden)


def _spectrum(table: ParameterTable, reader: ConfigReader, hidden: int) -> None:
    """``SpeechT5SpeechDecoderPostnet``: frames, their end, and convolutions with batch norms."""
    bins, frames = reader.integer("num_mel_bins"), reader.integer("reduction_factor")
    units, kernel = (reader.integer(f"speech_decoder_postnet_{key}") for key in ("units", "kernel"))
    count = reader.layers("speech_decoder_postnet_layers")
    with table.block("head"):
        table.linear("feat_out", hidden, bins * frames)
        table.linear("prob_out", hidden, frames)
        for index in range(count):
            inputs = bins if index == 0 else units
            outputs = bins if index == count - 1 else units
            table.convolution(f"postnet.{index}", inputs, outputs, kernel, bias=False)
            table.norm(f"postnet.{index}.norm", outputs)


_RECOGNITION = (Task.SEQ2SEQ_LM, Task.BASE)

BODIES: dict[str, tuple[Declare, str, tuple[Task, ...]]] = {
    "whisper": (_whisper, "max_target_positions", _RECOGNITION),
    "speech_to_text": (_speech_to_text, "max_target_positions", _RECOGNITION),
    "moonshine": (_moonshine, "max_position_embeddings", _RECOGNITION),
    "speecht5": (_speecht5, "max_text_positions", (*_RECOGNITION, Task.OTHER)),
}
"""What declares each type, the key of its longest text, and its tasks."""
