"""Language models whose pictures are read by trained queries: BLIP-2 and InstructBLIP, for pictures and for videos.

(transformers 5.23, modeling_*.py of models/blip_2, models/instructblip and models/instructblipvideo)
"""

from typing import Any, ClassVar

from memplan.classes.heads import BaseModel, MakeBase
from memplan.classes.joined.base import JoinedModel
from memplan.classes.pictures.base import PICTURE, PictureModel, PictureStates, PictureTask, begin
from memplan.classes.pictures.parts import as_tokens
from memplan.classes.pictures.vit import two_linear
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import (
    Attended,
    attention_function,
    in_heads,
    unwidened_attention,
)
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    spare,
)
from memplan.graph.modules.functional import expanded
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole
from memplan.model.spec import ModelSpec

FORMER = "qformer"
INSTRUCTED = "the whole text as the instruction that the Q-Former reads, too"


class BlipVisionEmbeddings(Module):
    """A token before the patches, and a position of each, whose table is cut to them."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        patch = config.integer("patch_size")
        self.count = (config.integer("image_size") // patch) ** 2 + 1
        self.class_embedding = Weight(1, 1, size)
        self.patch_embedding = Conv2d(3, size, patch, stride=patch)
        self.position_embedding = Weight(1, self.count, size)

    def forward(self, pixel_values: Handle) -> Handle:
        target_dtype = self.run.compute
        patch_embeds = self.patch_embedding(pixel_values.to(target_dtype))
        patch_embeds = as_tokens(patch_embeds)
        batch, _, size = patch_embeds.shape
        class_embeds = expanded(self.operand(self.class_embedding), (batch, 1, size))
        embeddings = concatenate(class_embeds, patch_embeds, dim=1)
        embeddings = embeddings + self.operand(self.position_embedding).to(target_dtype)
        return embeddings


class BlipAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, size: int) -> None:
        heads = config.integer("num_attention_heads")
        self.head_dim = config.divide("hidden_size", size, "num_attention_heads", heads)
        self.probability = config.number("attention_dropout", default=0.0)
        self.qkv = Linear(size, 3 * size, bias=config.flag("qkv_bias"))
        self.projection = Linear(size, size, bias=True)

    def forward(self, hidden_states: Handle) -> Attended:
        batch, length, size = hidden_states.shape
        mixed_qkv = self.qkv(hidden_states)
        mixed_qkv = mixed_qkv.view(batch, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        query_states, key_states, value_states = (mixed_qkv.select(0) for _ in range(3))
        attend = attention_function(self.run, unwidened_attention, causal=False)
        attn_output, attn_weights = attend(
            query_states, key_states, value_states, None, self.probability
        )
        attn_output = attn_output.view(batch, length, size)
        attn_output = self.projection(attn_output)
        return attn_output, attn_weights


class BlipEncoderLayer(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        inner = config.integer("intermediate_size")
        self.self_attn = BlipAttention(config, size)
        self.layer_norm1 = LayerNorm(size)
        self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))
        self.layer_norm2 = LayerNorm(size)

    def forward(self, hidden_states: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.layer_norm2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = hidden_states + residual
        return hidden_states


class BlipVisionModel(PictureModel):
    prefix = tower = "vision_model"
    casts = recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}

    def __init__(self, config: ConfigReader) -> None:
        self.width = size = config.integer("hidden_size")
        self.embeddings = BlipVisionEmbeddings(config, size)
        self.context = self.embeddings.count
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "vision_model.layers", kinds, lambda _: BlipEncoderLayer(config, size)
        )
        self.children["encoder.layers"] = self.children.pop("layers")
        self.post_layernorm = LayerNorm(size)
        side = config.integer("image_size", default=PICTURE)
        self.picture = self.described(side, channels=3, fixed=True)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embeddings(pixel_values)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states)
        begin(self, f"{self.tower}.norm", ModelPart.NORM, hidden_states)
        last_hidden_state = self.post_layernorm(hidden_states)
        with UnreadGraph(self.run):
            pooled_output = last_hidden_state.select(1)
            pooled_output = self.post_layernorm(pooled_output)
        return last_hidden_state, pooled_output


class QFormerMultiHeadAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, size: int, source: int) -> None:
        heads = config.integer("num_attention_heads")
        self.head_dim = config.divide("hidden_size", size, "num_attention_heads", heads)
        self.probability = config.number("attention_probs_dropout_prob", default=0.1)
        self.query = Linear(size, size, bias=True)
        self.key, self.value = Linear(source, size, bias=True), Linear(source, size, bias=True)

    def forward(self, hidden_states: Handle, current_states: Handle) -> Attended:
        query_layer = in_heads(self.query(hidden_states), self.head_dim)
        key_layer = in_heads(self.key(current_states), self.head_dim)
        value_layer = in_heads(self.value(current_states), self.head_dim)
        attend = attention_function(self.run, unwidened_attention, causal=False)
        attn_output, attn_weights = attend(
            query_layer, key_layer, value_layer, None, self.probability
        )
        attn_output = attn_output.view(*hidden_states.shape)
        return attn_output, attn_weights


class QFormerOutput(Module):
    def __init__(self, config: ConfigReader, inputs: int, size: int) -> None:
        self.dense, self.LayerNorm = Linear(inputs, size, bias=True), LayerNorm(size)
        self.dropout = Dropout(config.number("hidden_dropout_prob", default=0.1))

    def forward(self, hidden_states: Handle, input_tensor: Handle) -> Handle:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states


class QFormerAttention(Module):
    def __init__(self, config: ConfigReader, size: int, source: int) -> None:
        self.attention = QFormerMultiHeadAttention(config, size, source)
        self.output = QFormerOutput(config, size, size)

    def forward(self, hidden_states: Handle, current_states: Handle) -> Handle:
        attn_output, _ = self.attention(hidden_states, current_states)
        attention_output: Handle = self.output(attn_output, hidden_states)
        return attention_output


class QFormerIntermediate(Module):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.dense = Linear(size, config.integer("intermediate_size"), bias=True)
        self.intermediate_act_fn = ActivationModule(tower_activation(config, "hidden_act"))

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.intermediate_act_fn(hidden_states)
        return hidden_states


class QFormerLayer(Module):
    """Queries read the tower's tokens in some layers; words beside them have a network of their own."""

    def __init__(self, config: ConfigReader, source: int, *, words: bool) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.attention = QFormerAttention(config, size, size)
        if source:
            self.crossattention = QFormerAttention(config, size, source)
        if words:
            self.intermediate = QFormerIntermediate(config, size)
            self.output = QFormerOutput(config, inner, size)
        self.intermediate_query = QFormerIntermediate(config, size)
        self.output_query = QFormerOutput(config, inner, size)

    def forward(self, hidden_states: Handle, count: int, memory: Handle) -> Handle:
        attention_output = self.attention(hidden_states, hidden_states)
        rest = attention_output.shape[1] - count
        query_attention_output = attention_output.narrow(count, 1)
        if "crossattention" in self.children:
            query_attention_output = self.crossattention(query_attention_output, memory)
        layer_output = self.chunk(query_attention_output, "_query")
        if rest:
            layer_output_text = self.chunk(attention_output.narrow(rest, 1))
            layer_output = concatenate(layer_output, layer_output_text, dim=1)
        return layer_output

    def chunk(self, attention_output: Handle, kind: str = "") -> Handle:
        """``feed_forward_chunk``."""
        intermediate_output = self.children[f"intermediate{kind}"](attention_output)
        layer_output: Handle = self.children[f"output{kind}"](intermediate_output, attention_output)
        return layer_output


class QFormerEmbeddings(Module):
    """Words behind the queries: what of a sequence is no picture."""

    frames = 1
    """Pictures that are told the same words."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.longest = config.integer("max_position_embeddings")
        self.word_embeddings = Embedding(config.integer("vocab_size"), size)
        self.position_embeddings = Embedding(self.longest, size)
        self.layernorm = LayerNorm(size)
        self.dropout = Dropout(config.number("hidden_dropout_prob", default=0.1))

    def forward(self, query_embeds: Handle) -> Handle:
        run, (batch, count, _) = self.run, query_embeds.shape
        options = run.options
        seen = batch * count // options.batch_size
        length = max(1, min(options.seq_len - seen, self.longest))
        run.hold_buffer(self.longest, DType.INT64)
        shape = batch, length
        given = from_batch(run, batch * length // self.frames, DType.INT64)
        ids = Handle(run, given, (batch // self.frames, length))
        if self.frames > 1:
            ids = made_by(run, OperationKind.REPEAT_INTERLEAVE, shape, DType.INT64)
        position_ids = made_by(run, OperationKind.CLONE, (1, length), DType.INT64)
        embeddings = self.word_embeddings(shape, ids)
        position_embeddings = self.position_embeddings((1, length), position_ids)
        embeddings = embeddings + position_embeddings
        del position_embeddings
        embeddings = concatenate(query_embeds, embeddings, dim=1)
        embeddings = self.layernorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class QFormerModel(Module):
    """A BERT whose queries read the tower's tokens in every so-manieth layer."""

    tower = FORMER
    words = True
    """It reads words, too."""

    def __init__(self, config: ConfigReader, source: int) -> None:
        self.width = size = config.integer("hidden_size")
        self.add_tables(config, size)
        every = config.integer("cross_attention_frequency")
        kinds = [
            source * (not number % every) for number in range(config.layers("num_hidden_layers"))
        ]
        self.layer = LayerList(
            f"{FORMER}.layers", kinds, lambda kind: QFormerLayer(config, kind, words=self.words)
        )
        self.children["encoder.layer"] = self.children.pop("layer")

    def add_tables(self, config: ConfigReader, size: int) -> None:
        """What stands before the layers."""
        self.embeddings = QFormerEmbeddings(config, size)

    def embedded(self, query_embeds: Handle) -> Handle:
        """What the first layer reads."""
        found: Handle = self.embeddings(query_embeds)
        return found

    def forward(self, query_embeds: Handle, encoder_hidden_states: Handle) -> Handle:
        hidden_states = self.embedded(query_embeds)
        for layer_module in self.layer:
            hidden_states = layer_module(
                hidden_states, query_embeds.shape[1], encoder_hidden_states
            )
        return hidden_states


class Blip2QFormerModel(QFormerModel):
    """It reads pictures alone."""

    words = False

    def add_tables(self, config: ConfigReader, size: int) -> None:
        self.layernorm = LayerNorm(size)
        self.dropout = Dropout(config.number("hidden_dropout_prob", default=0.1))

    def embedded(self, query_embeds: Handle) -> Handle:
        embedding_output = self.layernorm(query_embeds)
        made: Handle = self.dropout(embedding_output)
        return made


class InstructBlipModel(JoinedModel):
    text = PartSpec(key="text_config", model_type="opt")
    sees, leads = "vision_model", "language_projection"
    former_class: ClassVar[type[QFormerModel]] = QFormerModel

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config)
        former = read_part(config, PartSpec(key="qformer_config", model_type="blip_2_qformer"))
        size = former.reader.integer("hidden_size")
        self.query_tokens = Weight(1, config.integer("num_query_tokens"), size)
        self.qformer = self.former_class(former.reader, tower.width)
        self.language_projection = Linear(size, self.text_width(config), bias=True)
        self.add_text(config)
        self.picture = replace(self.picture, meant=INSTRUCTED)

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:
        """As the text's own config says."""
        del config
        return tied

    def get_image_features(self) -> Handle:
        run = self.run
        image_embeds, *_ = self.outputs()
        run.finish(image_embeds.record)
        run.start(
            f"{FORMER}.embed", None, part=ModelPart.EMBEDDING,
            frozen=self.is_frozen(ModelPart.EMBEDDING, FORMER),
        )  # fmt: skip
        shape = image_embeds.shape[0], *self.query_tokens.shape[1:]
        query_tokens = expanded(self.operand(self.query_tokens), shape)
        query_output = self.qformer(query_tokens, image_embeds)
        self.begin_projector(query_output)
        query_output = query_output.narrow(shape[1], 1)
        found: Handle = self.language_projection(query_output)
        return found


class InstructBlipVideoModel(InstructBlipModel):
    """Each clip has four frames."""

    frames = 4

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.show(crops=self.frames)
        self.qformer.embeddings.frames = self.frames

    def get_image_features(self) -> Handle:
        image_features = super().get_image_features()
        return image_features.view(self.run.options.batch_size, -1, image_features.shape[-1])


class BaseWithHead(BaseModel):
    """Its output matrix is there, and nothing reads it."""

    def __init__(self, config: ConfigReader, model: ModelSpec, base: MakeBase) -> None:
        super().__init__(config, model, base)
        if not model.head.tied:
            self.lm_head = Linear(self.width, model.num_outputs, role=WeightRole.OUTPUT)

    def begin_head(self, x: Handle) -> None:
        super().begin_head(x)
        if "lm_head" in self.children:
            spare(self.lm_head)


class Blip2Model(InstructBlipModel):
    former_class = Blip2QFormerModel

    @classmethod
    def named_task(cls, config: ConfigReader, model: ModelSpec) -> type[Any] | None:
        """The class without a task has a language model's head."""
        return BaseWithHead if model.task is TaskKind.BASE else super().named_task(config, model)
