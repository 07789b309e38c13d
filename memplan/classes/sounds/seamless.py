"""SeamlessM4T, both versions: translation between speech and text, of which that to text has a loss.

Each class takes some of five parts: a text encoder, a speech encoder (a Conformer), a text decoder, a model from
text to units of speech, and a vocoder; the base model has them all, and hears here. Layers that ``layerdrop`` may
skip are counted as run. (transformers 5.23: models/seamless_m4t, seamless_m4t_v2)
"""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from memplan.classes.heads import MakeBase
from memplan.classes.sounds.base import SECONDS, SoundTask, begin, beside_its_lists
from memplan.classes.sounds.conformer import (
    ROTARY,
    SINES,
    TABLE,
    Conformer,
    ConformerAdapterLayer,
    ConformerEncoderLayer,
    ConformerSelfAttention,
    PositionTables,
    network,
    positions_of,
)
from memplan.classes.sounds.conformers import FRAMES_A_SECOND
from memplan.classes.sounds.parts import OutsideCheckpoints, Sines
from memplan.classes.sounds.recognition import Generation, Recognizer, SoundDecoder, SoundStack
from memplan.classes.sounds.units import CodeHifiGan, UnitDecoderLayer, variance_predictor
from memplan.classes.translating.layers import BartAttention
from memplan.classes.translating.tables import ScaledWordEmbedding
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    dropout,
    spare,
    spare_alone,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask, shifted_right
from memplan.graph.modules.module import Module, Site, Weight
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec


class SeamlessM4TAttention(BartAttention):
    def __init__(
        self, config: ConfigReader, stack: str, *, causal: bool = False, cross: bool = False
    ) -> None:
        hidden, key = config.integer("hidden_size"), f"{stack}_attention_heads"
        self.num_heads = config.integer(key)
        self.head_dim = config.divide("hidden_size", hidden, key, self.num_heads)
        self.causal, self.dropout = causal, config.number("attention_dropout", default=0.0)
        if cross:
            self.block = LayerBlock.CROSS_ATTENTION
        self.add_projections(hidden, bias=True)


class FeedForwardNetwork(Module):
    """Between both matrices autocast's result is cast to the second one's own format."""

    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader, stack: str) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer(f"{stack}_ffn_dim")
        self.fc1, self.fc2 = Linear(hidden, inner, bias=True), Linear(inner, hidden, bias=True)
        self.dropout = Dropout(config.number("activation_dropout", default=0.0))
        self.act = ActivationModule(tower_activation(config, "activation_function", default="relu"))

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states)
        if self.run.autocast is not None:
            hidden_states = hidden_states.to(DType.FP32)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


class SeamlessM4TEncoderLayer(Module):
    def __init__(self, config: ConfigReader, stack: str = "encoder") -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = SeamlessM4TAttention(config, stack)
        self.attn_dropout = Dropout(config.number("dropout", default=0.0))
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.ffn = FeedForwardNetwork(config, stack)
        self.ffn_layer_norm = LayerNorm(hidden)
        self.ffn_dropout = Dropout(config.number("activation_dropout", default=0.0))

    def forward(self, hidden_states: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states)
        hidden_states = self.attn_dropout(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.ffn_layer_norm(hidden_states)
        hidden_states = self.ffn(hidden_states)
        hidden_states = self.ffn_dropout(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class SeamlessM4TDecoderLayer(Module):
    def __init__(self, config: ConfigReader, stack: str = "decoder") -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = SeamlessM4TAttention(config, stack, causal=True)
        self.attn_dropout = Dropout(config.number("dropout", default=0.0))
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.cross_attention = SeamlessM4TAttention(config, stack, cross=True)
        self.cross_attention_layer_norm = LayerNorm(hidden)
        self.ffn = FeedForwardNetwork(config, stack)
        self.ffn_layer_norm = LayerNorm(hidden)
        self.ffn_dropout = Dropout(config.number("activation_dropout", default=0.0))

    def forward(self, hidden_states: Handle, mask: Handle | None, memory: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, None, mask)
        hidden_states = self.attn_dropout(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.cross_attention_layer_norm(hidden_states)
        hidden_states, _ = self.cross_attention(hidden_states, memory)
        hidden_states = self.attn_dropout(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.ffn_layer_norm(hidden_states)
        hidden_states = self.ffn(hidden_states)
        hidden_states = self.ffn_dropout(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class SeamlessM4TEncoder(SoundStack):
    """Of texts, or, without a table, of the model from text to units."""

    def __init__(self, config: ConfigReader, prefix: str = "") -> None:
        hidden = config.integer("hidden_size")
        self.dropout = config.number("dropout", default=0.0)
        if not prefix:
            self.embed_tokens = ScaledWordEmbedding(config.integer("vocab_size"), hidden)
            self.embed_positions = Sines(config.integer("max_position_embeddings"), hidden)
        kinds = [None] * config.layers(f"{prefix}encoder_layers")
        make = partial(SeamlessM4TEncoderLayer, config, f"{prefix}encoder")
        self.layers = LayerList(f"{prefix}encoder.layers", kinds, lambda _: make())
        self.add_norm(LayerNorm(hidden))

    def forward(self, input_ids: Handle) -> Handle:
        inputs_embeds = self.embed_tokens(input_ids.shape, input_ids)
        embed_pos = self.embed_positions(input_ids)
        hidden_states = inputs_embeds + embed_pos
        hidden_states = dropout(hidden_states, self.dropout)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class SeamlessM4TDecoder(SoundDecoder):
    def __init__(self, config: ConfigReader, prefix: str = "") -> None:
        hidden = config.integer("hidden_size")
        self.dropout = config.number("dropout", default=0.0)
        self.embed_tokens = ScaledWordEmbedding(config.integer(f"{prefix}vocab_size"), hidden)
        self.embed_positions = Sines(config.integer("max_position_embeddings"), hidden)
        kinds = [None] * config.layers(f"{prefix}decoder_layers")
        make = partial(SeamlessM4TDecoderLayer, config, f"{prefix}decoder")
        self.layers = LayerList(f"{prefix}decoder.layers", kinds, lambda _: make())
        self.add_norm(LayerNorm(hidden))

    def forward(self, input_ids: Handle, encoder_hidden_states: Handle) -> Handle:
        inputs_embeds = self.embed_tokens(input_ids.shape, input_ids)
        attention_mask = causal_mask(self.run, *input_ids.shape)
        positions = self.embed_positions(input_ids)
        hidden_states = inputs_embeds + positions
        hidden_states = dropout(hidden_states, self.dropout)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, attention_mask, encoder_hidden_states)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class FeatureProjection(Module):
    def __init__(self, config: ConfigReader) -> None:
        features, hidden = config.integer("feature_projection_input_dim"), "hidden_size"
        self.layer_norm = LayerNorm(features)
        self.projection = Linear(features, config.integer(hidden), bias=True)
        self.dropout = Dropout(config.number("speech_encoder_dropout", default=0.0))

    def forward(self, hidden_states: Handle) -> Handle:
        norm_hidden_states = self.layer_norm(hidden_states)
        hidden_states = self.projection(norm_hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class NamedDistances(ConformerSelfAttention):
    """Variables of the call itself hold distances, their rows and products of these."""

    def looked_up(self, query: Handle) -> tuple[Handle, ...]:
        return self.pairs(query)


class SecondConformerEncoderLayer(ConformerEncoderLayer):
    attention_class = NamedDistances


class SpeechConformerEncoder(PositionTables):
    def __init__(self, config: ConfigReader, kind: Conformer) -> None:
        self.add_positions(kind)
        self.dropout = Dropout(kind.dropout)
        self.chunked = kind.causal and bool(config.optional_integer("speech_encoder_chunk_size"))
        made = SecondConformerEncoderLayer if kind.causal else ConformerEncoderLayer
        kinds = [None] * config.layers("speech_encoder_layers")
        self.layers = LayerList("speech_encoder.layers", kinds, lambda _: made(kind))
        self.layer_norm = LayerNorm(kind.size)
        self.layer_norm.segment = "speech_encoder.middle", ModelPart.OTHER

    def forward(self, hidden_states: Handle) -> Handle:
        length, attention_mask = hidden_states.shape[1], None
        if self.chunked:
            shape = 1, 1, length, length
            attention_mask = made_by(self.run, OperationKind.MASK, shape, DType.BOOL)
        hidden_states = self.dropout(hidden_states)
        relative_position_embeddings = self.relative(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, relative_position_embeddings, attention_mask)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class Adapter(Module):
    """Frames are made fewer."""

    def __init__(self, config: ConfigReader, kind: Conformer) -> None:
        drop = config.number("adaptor_dropout", default=0.0)
        kind = replace(
            kind, distances="", activation=Activation.RELU, dropout=drop, activation_dropout=drop
        )
        sizes = config.integer("adaptor_kernel_size"), config.integer("adaptor_stride")
        kinds = [None] * config.layers("num_adapter_layers")
        make = partial(ConformerAdapterLayer, kind, *sizes, drop)
        self.layers = OutsideCheckpoints("speech_encoder.adapter.layers", kinds, lambda _: make())

    def forward(self, hidden_states: Handle) -> Handle:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class SeamlessM4TSpeechEncoder(Module):
    def __init__(self, config: ConfigReader, kind: Conformer) -> None:
        self.feature_projection = FeatureProjection(config)
        self.encoder = SpeechConformerEncoder(config, kind)
        plain = replace(kind, activation=Activation.RELU, dropout=0.0, activation_dropout=0.0)
        self.intermediate_ffn = network(plain)
        if config.flag("add_adapter"):
            self.adapter = Adapter(config, kind)
        self.inner_layer_norm = LayerNorm(kind.size)
        self.inner_layer_norm.segment = "speech_encoder.norm", ModelPart.NORM

    def forward(self, input_features: Handle) -> Handle:
        hidden_states = self.feature_projection(input_features)
        hidden_states = self.encoder(hidden_states)
        expanded_hidden_states = self.intermediate_ffn(hidden_states)
        hidden_states = hidden_states + expanded_hidden_states * 0.5
        if "adapter" in self.children:
            hidden_states = self.adapter(hidden_states)
        hidden_states = self.inner_layer_norm(hidden_states)
        return hidden_states


def read_speech_conformer(config: ConfigReader, *, second: bool) -> Conformer:
    """The second version's convolutions see what was before alone."""
    hidden, heads = config.integer("hidden_size"), config.integer("speech_encoder_attention_heads")
    config.divide("hidden_size", hidden, "speech_encoder_attention_heads", heads)
    drop = config.number("speech_encoder_dropout", default=0.0)
    return Conformer(
        size=hidden, inner=config.integer("speech_encoder_intermediate_size"), heads=heads,
        activation=tower_activation(config, "speech_encoder_hidden_act"),
        kernel=config.integer("conv_depthwise_kernel_size"), causal=second,
        **positions_of(config, (TABLE,) if second else (SINES, ROTARY)),
        dropout=drop, activation_dropout=drop, attention_dropout=drop, convolution_dropout=drop,
    )  # fmt: skip


class UnitDecoder(Module):
    """Version 2's, which says characters and how long each sounds."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, predictor = config.integer("hidden_size"), "t2u_variance_predictor"
        self.embed_tokens = Embedding(config.integer("t2u_vocab_size"), hidden)
        self.embed_char = Embedding(config.integer("char_vocab_size"), hidden)
        self.pos_emb_alpha_char, self.pos_emb_alpha = Weight(1), Weight(1)
        sizes = (
            config.integer(f"{predictor}_{key}")
            for key in ("embed_dim", "hidden_dim", "kernel_size")
        )
        self.duration_predictor = variance_predictor(*sizes)
        kinds = [None] * config.layers("t2u_decoder_layers")
        make = partial(UnitDecoderLayer, config, SeamlessM4TAttention)
        self.layers = LayerList("t2u_decoder.layers", kinds, lambda _: make())
        self.layer_norm = LayerNorm(hidden)


class TextToUnits(Module):
    """An encoder without a table, and a decoder."""

    def __init__(self, config: ConfigReader, *, second: bool) -> None:
        self.encoder = SeamlessM4TEncoder(config, "t2u_")
        self.decoder = UnitDecoder(config) if second else SeamlessM4TDecoder(config, "t2u_")


class UnitsForConditionalGeneration(Module):
    def __init__(self, config: ConfigReader, *, second: bool) -> None:
        hidden, rows = config.integer("hidden_size"), config.integer("t2u_vocab_size")
        self.model = TextToUnits(config, second=second)
        self.lm_head = Linear(hidden, rows)
        if config.flag("tie_word_embeddings"):
            self.lm_head.weight = self.model.decoder.embed_tokens.weight


class Translation(Generation):
    """There is nothing around its modules."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        hears = any("ForSpeechTo" in each for each in config.texts("architectures"))
        super().__init__(config, model, partial(base, hears=hears, reads=not hears, speaks=False))

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """Their names are those that the class has for them."""
        super().attach(site, path, within)
        return self.base.attach(site, path, within)

    def add_head(self, config: ConfigReader) -> None:
        """The base model has it."""

    def begin(self) -> None:
        """What nothing runs through comes first."""
        for each in self.model.idle:
            declare_idle(self.model, each)
        super().begin()

    def outputs(self) -> Any:
        """Run the base model on what it hears or reads, and on the labels, shifted."""
        labels = self.labels()
        ids = shifted_right(self.run, labels.shape)
        given = self.model.clips() if self.model.hears else self.text()
        return *self.base(given, ids), labels, ids

    def text(self) -> Handle:
        """The source."""
        options = self.run.options
        shape = options.batch_size, min(options.seq_len, self.model.longest)
        return Handle(self.run, from_batch(self.run, shape[0] * shape[1], DType.INT64), shape)

    @property
    def head(self) -> Linear:
        """The output matrix."""
        found = self.base.children[self.model.output]
        assert isinstance(found, Linear)
        return found


class ToSpeech(Translation):
    """It has parts that speak, too."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        hears = any("ForSpeechTo" in each for each in config.texts("architectures"))
        made = partial(base, hears=hears, reads=not hears, speaks=True)
        Generation.__init__(self, config, model, made)


class AllParts(Translation):
    """The base model."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        Generation.__init__(self, config, model, base)


def declare_idle(base: Module, module: Module) -> None:
    """Segments of weights that no gradient reaches."""
    run = base.run
    begin(base, f"{module.path}.idle", ModelPart.OTHER, None)
    for each in beside_its_lists(module):
        spare_alone(each)
    run.finish(run.tensor(0, DType.FP32))
    for layers in (each for _, each in module.modules() if isinstance(each, LayerList)):
        run.beginnings[layers.segment_name] = layers.beginning
        for turn in layers.runs():
            run.start(
                layers.segment_name, None, part=ModelPart.LAYERS, repeat=turn.count,
                frozen=turn.frozen,
            )  # fmt: skip
            spare(layers.made[turn.kind])
            run.finish(run.tensor(0, DType.FP32))


class SeamlessM4TModel(Recognizer):
    prefix = "model"
    positions_key = "max_position_embeddings"
    output = "lm_head"
    endings: ClassVar[dict[str, type[SoundTask]]] = {
        "ForTextToText": Translation,
        "ForTextToSpeech": ToSpeech,
    }
    bare = AllParts
    second = False
    """Its speech encoder sees what was before alone, and it speaks without a decoder of units."""

    def __init__(
        self, config: ConfigReader, *, hears: bool = True, reads: bool = True, speaks: bool = True
    ) -> None:
        hidden, rows = config.integer("hidden_size"), config.integer("vocab_size")
        self.tied, self.hears = config.flag("tie_word_embeddings"), hears
        self.shared = Embedding(rows, hidden)
        if reads:
            self.text_encoder = self.sharing(SeamlessM4TEncoder(config))
        if hears:
            kind = read_speech_conformer(config, second=self.second)
            self.speech_encoder = SeamlessM4TSpeechEncoder(config, kind)
        self.text_decoder = self.sharing(SeamlessM4TDecoder(config))
        self.lm_head = Linear(hidden, rows, role=WeightRole.OUTPUT)
        if self.tied:
            self.lm_head.weight = self.shared.weight
        if speaks:
            self.t2u_model = UnitsForConditionalGeneration(config, second=self.second)
            self.vocoder = CodeHifiGan(config)
        self.vocab, self.width = rows, hidden
        self.longest = config.integer("max_position_embeddings") + Sines.offset
        channels = config.integer("feature_projection_input_dim") if hears else 0
        rate = FRAMES_A_SECOND
        stacks = ("encoder",) * (not hears) + ("decoder",)
        self.sound = self.described(channels, SECONDS * rate, rate, is_framed=True, stacks=stacks)

    def sharing(self, stack: Any) -> Any:
        """A stack whose table is the shared one, where they are tied."""
        if self.tied:
            stack.embed_tokens.weight = self.shared.weight
        return stack

    @property
    def encoder(self) -> Module:  # type: ignore[override]
        """That which hears, where there is one."""
        return self.children["speech_encoder" if self.hears else "text_encoder"]

    @property
    def decoder(self) -> SoundDecoder:  # type: ignore[override]
        """That of text."""
        return self.text_decoder

    @property
    def idle(self) -> list[Module]:
        """What nothing runs through."""
        names = ("text_encoder",) * self.hears + ("t2u_model", "vocoder")
        return [self.children[each] for each in names if each in self.children]

    def begin_first(self) -> None:
        """The first segment of the encoder."""
        name = "speech_encoder.embed" if self.hears else "encoder.embed"
        begin(self, name, ModelPart.EMBEDDING, None)
        if not self.tied:
            self.parameter(self.shared.weight).unused = True


class SeamlessM4Tv2Model(SeamlessM4TModel):
    second = True
