"""Gemma 4: patches placed by rows and columns, padded to as many for each picture, and pooled; a Conformer that is idle
where samples have pictures alone.

(transformers 5.23, models/gemma4/modeling_gemma4.py)
"""

from math import isqrt
from typing import ClassVar

from memplan.classes.beside_towers.gemma4 import Gemma4RMSNorm, UnscaledNorm, apply_rotary_pos_emb
from memplan.classes.joined.base import CollectedModel
from memplan.classes.joined.omni import Idle, listed
from memplan.classes.joined.packed import AxialRotaryEmbedding
from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask, begin
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import replace
from memplan.graph.attention.masks import additive_mask
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, concatenate
from memplan.graph.operations.elementwise import clamp_between
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.parameters import LayerBlock, ModelPart
from memplan.model.pictures import PictureSpec
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import AttentionKernel

SOFT_TOKENS = 280
"""The most tokens that Gemma 4's processor makes of a picture; it pads each to so many."""
COLOURS = 3
WIDENING = 4
"""How many times wider the feed-forward networks are (``Gemma4AudioFeedForward``)."""
CUBE = 3
"""Kernel of the convolutions of sound, which quarter both axes together."""


class Gemma4ClippableLinear(Module):
    """A linear layer, perhaps between two clamps by numbers that are buffers."""

    def __init__(self, config: ConfigReader, inputs: int, outputs: int) -> None:
        self.clips = config.flag("use_clipped_linears")
        self.linear = Linear(inputs, outputs)

    def forward(self, hidden_states: Handle) -> Handle:
        if self.clips:
            hidden_states = hidden_states.like(clamp_between(self.run, hidden_states.laid()))
        hidden_states = self.linear(hidden_states)
        if self.clips:
            hidden_states = hidden_states.like(clamp_between(self.run, hidden_states.laid()))
        return hidden_states


def apply_multidimensional_rope(x: Handle, tables: Tables) -> Handle:
    """Halves of each head turned by rows and by columns, joined."""
    half = x.shape[-1] // 2
    x_parts, cos_parts, sin_parts = (each.split(half, half) for each in (x, *tables))
    y_parts = [
        apply_rotary_pos_emb(*parts) for parts in zip(x_parts, cos_parts, sin_parts, strict=True)
    ]
    return concatenate(*y_parts)


class Gemma4VisionAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.head_dim = head_dim = config.integer("head_dim")
        self.probability = config.number("attention_dropout", default=0.0)
        width = config.integer("num_attention_heads") * head_dim
        narrow = config.integer("num_key_value_heads") * head_dim
        for name, outputs in (("q_proj", width), ("k_proj", narrow), ("v_proj", narrow)):
            setattr(self, name, Gemma4ClippableLinear(config, size, outputs))
        self.o_proj = Gemma4ClippableLinear(config, width, size)
        self.q_norm, self.k_norm = Gemma4RMSNorm(head_dim), Gemma4RMSNorm(head_dim)
        self.v_norm = UnscaledNorm()

    def states(self, name: str, hidden_states: Handle) -> Handle:
        """Of each head, normed."""
        batch, length, _ = hidden_states.shape
        made = self.children[f"{name}_proj"](hidden_states).view(batch, length, -1, self.head_dim)
        normed: Handle = self.children[f"{name}_norm"](made)
        return normed

    def forward(self, hidden_states: Handle, mask: Handle | None, tables: Tables) -> Attended:
        query_states, key_states = (
            apply_multidimensional_rope(self.states(name, hidden_states), tables).transpose(1, 2)
            for name in ("q", "k")
        )
        value_states = self.states("v", hidden_states).transpose(1, 2)
        attend = attention_function(self.run, causal=False)
        attn_output, attn_weights = attend(
            query_states, key_states, value_states, mask, self.probability
        )
        attn_output = attn_output.view(*hidden_states.shape[:2], -1)
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


class Gemma4VisionMLP(Module):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader, size: int) -> None:
        inner = config.integer("intermediate_size")
        self.gate_proj = Gemma4ClippableLinear(config, size, inner)
        self.up_proj = Gemma4ClippableLinear(config, size, inner)
        self.down_proj = Gemma4ClippableLinear(config, inner, size)
        active = tower_activation(config, "hidden_activation", default="gelu_pytorch_tanh")
        self.act_fn = ActivationModule(active)

    def forward(self, x: Handle) -> Handle:
        down_proj: Handle = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class Gemma4VisionEncoderLayer(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        self.self_attn = Gemma4VisionAttention(config, size)
        self.mlp = Gemma4VisionMLP(config, size)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", Gemma4RMSNorm(size))

    def forward(self, hidden_states: Handle, mask: Handle | None, tables: Tables) -> Handle:
        norms = self.children
        residual = hidden_states
        hidden_states = norms["input_layernorm"](hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, mask, tables)
        hidden_states = norms["post_attention_layernorm"](hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = norms["pre_feedforward_layernorm"](hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = norms["post_feedforward_layernorm"](hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class Gemma4VisionPatchEmbedder(Module):
    def __init__(self, config: ConfigReader, size: int, features: int) -> None:
        self.input_proj = Linear(features, size)
        self.position_embedding_table = Weight(2, config.integer("position_embedding_size"), size)

    def forward(self, pixel_values: Handle) -> Handle:
        pixel_values = (pixel_values + 0.5) * 2.0
        pixel_values = pixel_values.to(self.run.compute)
        hidden_states = self.input_proj(pixel_values)
        position_embeddings = self.positions(*hidden_states.shape)
        return hidden_states + position_embeddings

    def positions(self, batch: int, length: int, size: int) -> Handle:
        """Two look-ups in halves of one weight, zeros where there is padding."""
        run, table = self.run, self.parameter(self.position_embedding_table)
        numbers = made_by(run, OperationKind.ARANGE, (batch, length, 2), DType.INT64)
        found = []
        for _ in range(2):
            made = empty(run, (batch, length, size), table.dtype)
            run.record(
                OperationKind.EMBEDDING, (table, numbers.record), (made.record,),
                saves=(numbers.record,), gradients=(Gradient.FRESH, Gradient.NONE),
                backward_scratch_bytes=(table.storage.num_bytes // 2, RESULT),
            )  # fmt: skip
            found.append(made)
        position_embeddings = found[0] + found[1]
        padding = made_by(run, OperationKind.EQ, (batch, length), DType.BOOL)
        return kept_where(position_embeddings, padding)


def kept_where(x: Handle, padding: Handle) -> Handle:
    """With zeros where there is padding, which is kept."""
    made = empty(x.run, x.shape, x.dtype)
    x.run.record(
        OperationKind.WHERE, (x.record, padding.record), (made.record,), saves=(padding.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


class Gemma4VisionRotaryEmbedding(AxialRotaryEmbedding):
    """For each picture's patches; in the format of what is turned."""

    def of_pictures(self, x: Handle) -> Tables:
        batch, length, _ = x.shape
        cos, sin = (
            Handle(self.run, each.record, (batch, length, self.width))
            for each in self.of_patches(batch * length)
        )
        return cos.to(x.dtype), sin.to(x.dtype)


class Gemma4VisionModel(PictureModel):
    prefix = tower = "vision_model"
    casts = recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}

    def __init__(self, config: ConfigReader) -> None:
        self.width = size = config.integer("hidden_size")
        side, self.pooled = config.integer("patch_size"), config.integer("pooling_kernel_size")
        self.rows, self.features = SOFT_TOKENS * self.pooled**2, COLOURS * side**2
        across = isqrt(self.rows) // self.pooled * self.pooled
        self.tokens = (across // self.pooled) ** 2
        self.standardizes = config.flag("standardize")
        self.patch_embedder = Gemma4VisionPatchEmbedder(config, size, self.features)
        self.rotary_emb = Gemma4VisionRotaryEmbedding(config.integer("head_dim"))
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "vision_model.layers", kinds, lambda _: Gemma4VisionEncoderLayer(config, size)
        )
        self.children["encoder.layers"] = self.children.pop("layers")
        self.picture = self.described(across * side, channels=COLOURS, fixed=True)

    def pixels_shape(self) -> tuple[int, ...]:
        """Of patches, padded to as many for each."""
        return self.num_pictures, self.rows, self.features

    def mask(self, batch: int) -> Handle | None:
        """Which patches each one sees: all but padding."""
        run, rows = self.run, self.rows
        seen = made_by(run, OperationKind.EQ, (batch, rows), DType.BOOL)
        if run.kernels.attention.is_package:
            return None
        pairs = Tensor(batch * rows**2, DType.BOOL, seen.record.storage)
        if run.kernels.attention is AttentionKernel.EAGER:
            pairs = additive_mask(run, pairs, 1, run.compute)
        return Handle(run, pairs, (batch, 1, rows, rows))

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        inputs_embeds = self.patch_embedder(pixel_values)
        attention_mask = self.mask(inputs_embeds.shape[0])
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb.of_pictures(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, position_embeddings)
        begin(self, f"{self.tower}.pooler", ModelPart.OTHER, hidden_states)
        del attention_mask, position_embeddings
        hidden_states = self.pooler(hidden_states)
        if self.standardizes:
            hidden_states = hidden_states + 0.0
            scale = made_by(self.run, OperationKind.TO, (self.width,), DType.FP32)
            hidden_states = hidden_states * scale
        return (hidden_states.to(inputs_embeds.dtype),)

    def pooler(self, hidden_states: Handle) -> Handle:
        """Squares of patches averaged by their places, in fp32, without padding."""
        run, (batch, rows, size) = self.run, hidden_states.shape
        padding = made_by(run, OperationKind.EQ, (batch, rows), DType.BOOL)
        hidden_states = kept_where(hidden_states, padding)
        hidden_states = self.averaged(hidden_states)
        hidden_states = hidden_states.float() * 1.0
        count = batch * self.tokens
        numbers = made_by(run, OperationKind.ARANGE, (2 * count,), DType.INT64)
        made = empty(run, (count, size), DType.FP32)
        run.record(
            OperationKind.INDEX, (hidden_states.record, numbers.record), (made.record,),
            saves=(numbers.record,), gradients=(Gradient.FRESH, Gradient.NONE),
        )  # fmt: skip
        return made

    def averaged(self, hidden_states: Handle) -> Handle:
        """``_avg_pool_by_positions``."""
        run, (batch, rows, size) = self.run, hidden_states.shape
        places = rows // self.pooled**2
        whole = made_by(run, OperationKind.EYE, (batch, rows, places), DType.INT64)
        weights = whole.apart(OperationKind.TO, dtype=DType.FP32)
        del whole
        weights = weights.apart(OperationKind.DIV)
        shares, given = weights, hidden_states.float()
        if run.autocast is not None:
            shares, given = shares.to(run.autocast), given.to(run.autocast)
        output = empty(run, (batch, places, size), given.dtype)
        run.record(
            OperationKind.MATMUL, (shares.record, given.record), (output.record,),
            saves=(shares.record,), gradients=(Gradient.NONE, Gradient.FRESH),
            flops=2 * shares.numel * size,
        )  # fmt: skip
        return output.to(hidden_states.dtype)


class Gemma4MultimodalEmbedder(Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        self.embedding_projection = Linear(inputs, outputs)
        self.embedding_pre_projection_norm = UnscaledNorm()

    def forward(self, inputs_embeds: Handle) -> Handle:
        embs_normed = self.embedding_pre_projection_norm(inputs_embeds)
        made: Handle = self.embedding_projection(embs_normed)
        return made


def audio_layer(config: ConfigReader, size: int) -> Idle:
    """``Gemma4AudioLayer``: linear layers without bias, RMS norms, relative positions."""
    heads = config.integer("num_attention_heads")
    head_dim = config.divide("hidden_size", size, "num_attention_heads", heads)
    kernel = config.integer("conv_kernel_size")

    def network() -> Idle:
        return Idle(
            ffw_layer_1=Linear(size, WIDENING * size), ffw_layer_2=Linear(WIDENING * size, size),
            pre_layer_norm=Gemma4RMSNorm(size), post_layer_norm=Gemma4RMSNorm(size),
        )  # fmt: skip

    attention = Idle(
        **{
            name: Linear(size, size)
            for name in ("relative_k_proj", "q_proj", "k_proj", "v_proj", "post")
        }
    )
    attention.per_dim_scale = Weight(head_dim)
    return Idle(
        feed_forward1=network(), feed_forward2=network(), self_attn=attention,
        lconv1d=Idle(
            linear_start=Linear(size, 2 * size), linear_end=Linear(size, size),
            depthwise_conv1d=Conv1d(size, size, kernel, groups=size, bias=False),
            pre_layer_norm=Gemma4RMSNorm(size), conv_norm=Gemma4RMSNorm(size),
        ),
        **{f"norm_{place}": Gemma4RMSNorm(size) for place in ("pre_attn", "post_attn", "out")},
    )  # fmt: skip


def audio_tower(config: ConfigReader) -> Idle:
    """``Gemma4AudioModel``."""
    size, channels = (
        config.integer("hidden_size"),
        config.integers("subsampling_conv_channels", minimum=1),
    )
    if len(channels) != 2:
        error = config.fail("subsampling_conv_channels", f"expected two, got {len(channels)}")
        raise error
    first, second = channels
    stem = Idle(
        **{
            f"layer{number}": Idle(
                conv=Conv2d(before, after, CUBE, bias=False), norm=LayerNorm(after, bias=False)
            )
            for number, (before, after) in enumerate(((1, first), (first, second)))
        },
        input_proj_linear=Linear(first // 4 * second, size),
    )
    count = config.layers("num_hidden_layers")
    return Idle(
        "audio_tower", subsample_conv_projection=stem,
        layers=listed("audio_tower", count, lambda: audio_layer(config, size)),
        output_proj=Linear(size, config.integer("output_proj_dims"), bias=True),
    )  # fmt: skip


class Gemma4Model(CollectedModel):
    """Either tower may be missing."""

    text = PartSpec(key="text_config")
    picture = PictureSpec(channels=0, image=(0, 0))
    unseen = "audio_tower", "embed_audio"

    def __init__(self, config: ConfigReader) -> None:
        outputs = self.text_width(config)
        tower = self.add_tower(config) if config.has("vision_config") else None
        self.add_text(config)
        self.words.window_blocks = self.part.reader.raw("use_bidirectional_attention") == "vision"
        audio = None
        if config.has("audio_config"):
            audio = read_part(config, PartSpec(key="audio_config")).reader
            self.audio_tower = audio_tower(audio)
        if tower is not None:
            self.embed_vision = Gemma4MultimodalEmbedder(tower.width, outputs)
        if audio is not None:
            inputs = audio.integer("output_proj_dims", "hidden_size")
            self.embed_audio = Idle(
                "audio_tower_projector", embedding_projection=Linear(inputs, outputs)
            )

    @property
    def is_shown(self) -> bool:
        """Whether samples have pictures, and it sees."""
        return self.sees in self.children and super().is_shown

    def told(self, model: ModelSpec, task: TaskKind | None) -> ModelSpec:
        """Without a tower it is its text."""
        del task
        return model if self.sees in self.children else replace(model, join=None)

    def get_image_features(self) -> Handle:
        (last_hidden_state,) = self.outputs()
        self.begin_projector(last_hidden_state)
        made: Handle = self.embed_vision(last_hidden_state)
        return made
