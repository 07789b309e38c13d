"""The Vision Transformer and its kin over pictures: ViT, DeiT, I-JEPA, DINOv2.

(transformers 5.23, modeling_*.py of models/vit, models/deit, models/ijepa, models/dinov2 and models/dinov2_with_registers)
"""

from collections.abc import Hashable
from typing import ClassVar

from memplan.classes.pictures.base import (
    IMAGES,
    FirstToken,
    ImageClassification,
    PictureModel,
    PictureTask,
)
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.classes.pictures.patches import MASKED, MaskedImageModeling
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair, ratio
from memplan.families.towers.vit import num_patches
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.attention import (
    Attend,
    Attended,
    attention_function,
    in_heads,
    unwidened_attention,
)
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import expanded, mean_of_tokens
from memplan.graph.modules.grids import Conv2d, DropPath, interpolate
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class PatchEmbeddings(Module):
    """A convolution whose windows are the patches."""

    def __init__(self, config: ConfigReader) -> None:
        channels, patch = config.integer("num_channels"), pair(config, "patch_size")
        size = config.integer("hidden_size")
        self.projection = Conv2d(channels, size, *patch, stride=patch)

    def forward(self, pixel_values: Handle) -> Handle:
        return as_tokens(self.projection(pixel_values))


class ViTEmbeddings(Module):
    """Tokens before the patches, and a position for each of all."""

    tokens: tuple[str, ...] = ("cls_token",)
    is_placed = True
    """It has a table of positions."""

    def __init__(self, config: ConfigReader) -> None:
        self.size, count = config.integer("hidden_size"), num_patches(config) + len(self.tokens)
        for name in self.tokens:
            setattr(self, name, Weight(1, 1, self.size))
        self.add_own(config)
        self.patch_embeddings = PatchEmbeddings(config)
        if self.is_placed:
            self.position_embeddings = Weight(1, count, self.size)
        self.dropout = Dropout(config.number("hidden_dropout_prob", default=0.0))

    def add_own(self, config: ConfigReader) -> None:
        """What a type has beside."""

    def forward(self, pixel_values: Handle) -> Handle:
        batch, _, *sides = pixel_values.shape
        embeddings = self.patch_embeddings(pixel_values)
        cls_tokens = [self.spread(name, batch, 1) for name in self.tokens]
        if cls_tokens:
            embeddings = concatenate(*cls_tokens, embeddings, dim=1)
        if self.is_placed:
            embeddings = embeddings + self.positions(sides[0], sides[1])
        embeddings = self.registered(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings

    def spread(self, name: str, batch: int, rows: int) -> Handle:
        """``self.token.expand(batch, -1, -1)``."""
        return expanded(self.operand(self.weights[name]), (batch, rows, self.size))

    def positions(self, height: int, width: int) -> Handle:  # noqa: ARG002
        """What is added to the patches of a picture of so many pixels."""
        return self.operand(self.position_embeddings)

    def registered(self, embeddings: Handle) -> Handle:
        """With what stands between the tokens and the patches."""
        return embeddings


class Heads(Module):
    """Queries, keys and values of tokens that all see one another."""

    block = LayerBlock.ATTENTION
    names = "q_proj", "k_proj", "v_proj"
    output = "o_proj"
    output_bias = True
    dropout_key = "attention_probs_dropout_prob"
    eager: Attend | None = None

    def __init__(self, config: ConfigReader, size: int) -> None:
        heads, bias = config.integer("num_attention_heads"), self.biases(config)
        self.head_dim = config.integer("head_dim", default=max(1, size // heads))
        self.probability = config.number(self.dropout_key, default=0.0)
        width = heads * self.head_dim
        for name, has_bias in zip(self.names, bias, strict=True):
            setattr(self, name, Linear(size, width, bias=has_bias))
        if self.output:
            projection = Linear(
                width, size, bias=self.output_bias, role=WeightRole.ATTENTION_OUTPUT
            )
            setattr(self, self.output, projection)

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        """Of each of the three."""
        return (config.flag("qkv_bias"),) * 3

    def attend(self, query: Handle, key: Handle, value: Handle) -> Attended:
        """The attention function of the kernels that are asked for."""
        attend = attention_function(self.run, self.eager, causal=False)
        return attend(query, key, value, None, self.probability)


class ViTAttention(Heads):
    def forward(self, hidden_states: Handle) -> Attended:
        query_states, key_states, value_states = (
            in_heads(self.children[name](hidden_states), self.head_dim) for name in self.names
        )
        attn_output, attn_weights = self.attend(query_states, key_states, value_states)
        attn_output = attn_output.reshape(*hidden_states.shape[:2], -1)
        attn_output = self.children[self.output](attn_output)
        return attn_output, attn_weights


def two_linear(size: int, inner: int, active: Activation) -> InOrder:
    """``ViTMLP``."""
    made = InOrder(
        fc1=Linear(size, inner, bias=True), activation_fn=ActivationModule(active),
        fc2=Linear(inner, size, bias=True),
    )  # fmt: skip
    made.block = LayerBlock.NETWORK
    return made


class ViTLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.attention = ViTAttention(config, size)
        self.layernorm_before, self.layernorm_after = LayerNorm(size), LayerNorm(size)
        self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))
        self.dropout = Dropout(config.number("hidden_dropout_prob", default=0.0))

    def forward(self, hidden_states: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.layernorm_before(hidden_states)
        hidden_states, _ = self.attention(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.layernorm_after(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = hidden_states + residual
        return hidden_states


class ViTPooler(InOrder):
    """The first token's vector, through a linear layer."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        width = config.integer("pooler_output_size", default=size)
        active = tower_activation(config, "pooler_act", default="tanh")
        super().__init__(dense=Linear(size, width, bias=True), activation=ActivationModule(active))

    def forward(self, hidden_states: Handle) -> Handle:
        return super().forward(hidden_states.select(1))


class ViTMaskedImageModeling(MaskedImageModeling):
    size_key = "hidden_size"
    drops = ("pooler",)


class ViTForImageClassification(FirstToken):
    drops = ("pooler",)


class ViTModel(PictureModel):
    prefix = "vit"
    recomputes = casts = True
    embeddings_class: type[ViTEmbeddings] = ViTEmbeddings
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        IMAGES: ViTForImageClassification, MASKED: ViTMaskedImageModeling,
    }  # fmt: skip
    fixed = True
    """Its class takes pictures of one size alone."""
    layers_in = "layers"
    pools = True

    def __init__(self, config: ConfigReader) -> None:
        self.width, self.context = config.integer("hidden_size"), num_patches(config)
        self.embeddings = self.embeddings_class(config)
        kinds = self.kinds(config, config.layers("num_hidden_layers"))
        self.layers = LayerList("layers", kinds, lambda kind: self.layer(config, kind))
        self.children[self.layers_in] = self.children.pop("layers")
        self.layernorm = LayerNorm(self.width)
        self.layernorm.segment = "norm", ModelPart.NORM
        if self.pools:
            self.pooler = ViTPooler(config, self.width)
        channels = config.integer("num_channels")
        self.picture = self.described(
            *pair(config, "image_size"), channels=channels, fixed=self.fixed
        )

    def kinds(self, config: ConfigReader, depth: int) -> list[Hashable]:  # noqa: ARG002
        """What sets layers apart."""
        return [None] * depth

    def layer(self, config: ConfigReader, kind: Hashable) -> Module:  # noqa: ARG002
        """One of a kind."""
        return ViTLayer(config)

    def left_out(self, ending: str) -> bool:
        """Which patches pretraining hides is not written down."""
        return ending == MASKED

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        pixel_values = pixel_values.to(self.run.compute)
        embedding_output = self.embeddings(pixel_values)
        hidden_states = embedding_output
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        sequence_output = self.layernorm(hidden_states)
        if "pooler" not in self.children:
            return (sequence_output,)
        with self.pooling(sequence_output):
            pooled_output = self.pooler(sequence_output)
        return sequence_output, pooled_output


class DeiTEmbeddings(ViTEmbeddings):
    tokens = "cls_token", "distillation_token"


class DeiTForImageClassificationWithTeacher(PictureTask):
    """Of the class token and of the distillation token, averaged; the class has no loss of its own."""

    drops = ("pooler",)
    names = "cls_classifier", "distillation_classifier"

    def add_head(self, config: ConfigReader) -> None:
        """Two classifiers."""
        del config
        for name in self.names if self.spec.num_labels else ():
            setattr(self, name, Linear(self.model.width, self.spec.num_labels, bias=True))

    def loss_of(self, sequence_output: Handle, *others: Handle) -> Tensor:
        """As ``ForImageClassification``'s."""
        del others
        if not self.spec.num_labels:
            return sequence_output.record
        cls_logits, distillation_logits = (
            self.children[name](sequence_output.select(1)) for name in self.names
        )
        logits = (cls_logits + distillation_logits) / 2.0
        labels = from_batch(self.run, logits.shape[0], DType.INT64)
        loss = cross_entropy(self.run, logits.record, labels)
        hand_out(self.run, logits.record)
        return loss


class DeiTModel(ViTModel):
    prefix = "deit"
    embeddings_class = DeiTEmbeddings
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        **ViTModel.endings,
        "ForImageClassificationWithTeacher": DeiTForImageClassificationWithTeacher,
    }


class IJepaEmbeddings(ViTEmbeddings):
    tokens = ()


class IJepaForImageClassification(ImageClassification):
    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The mean of all tokens."""
        del others
        return mean_of_tokens(last_hidden_state)


class IJepaModel(ViTModel):
    prefix = "ijepa"
    pools = False
    embeddings_class = IJepaEmbeddings
    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: IJepaForImageClassification}


class Dinov2Embeddings(ViTEmbeddings):
    """Positions are resized to the picture, in fp32."""

    def add_own(self, config: ConfigReader) -> None:
        """A token for hidden patches, whatever the class is for."""
        self.patch, self.image = pair(config, "patch_size"), pair(config, "image_size")
        if config.flag("use_mask_token", default=True):
            self.mask_token = Weight(1, self.size)

    def forward(self, pixel_values: Handle) -> Handle:
        if "mask_token" in self.weights:
            self.parameter(self.mask_token).unused = True
        return super().forward(pixel_values)

    def positions(self, height: int, width: int) -> Handle:
        """The table, or with its rows of patches resized."""
        table = self.operand(self.position_embeddings)
        if (height, width) == self.image:
            return table
        class_pos_embed, patch_pos_embed = table.narrow(1, 1), table.narrow(table.shape[1] - 1, 1)
        side = round(patch_pos_embed.shape[1] ** 0.5)
        patch_pos_embed = patch_pos_embed.view(1, side, side, self.size).permute(0, 3, 1, 2)
        sides = height // self.patch[0], width // self.patch[1]
        patch_pos_embed = self.resized(patch_pos_embed, *sides)
        patch_pos_embed = patch_pos_embed.permute(0, 2, 3, 1).view(1, -1, self.size)
        return concatenate(class_pos_embed, patch_pos_embed, dim=1)

    def resized(self, table: Handle, height: int, width: int) -> Handle:
        """In fp32."""
        return interpolate(table.float(), height, width).to(table.dtype)


class RegisterEmbeddings(Dinov2Embeddings):
    def add_own(self, config: ConfigReader) -> None:
        """Tokens without a position."""
        super().add_own(config)
        self.count = config.integer("num_register_tokens")
        self.register_tokens = Weight(1, self.count, self.size)

    def registered(self, embeddings: Handle) -> Handle:
        """They stand behind the first token."""
        batch, length, _ = embeddings.shape
        registers = self.spread("register_tokens", batch, self.count)
        return concatenate(
            embeddings.narrow(1, 1), registers, embeddings.narrow(length - 1, 1), dim=1
        )


class Dinov2Attention(ViTAttention):
    eager = staticmethod(unwidened_attention)


class Dinov2SwiGLUFFN(Module):
    block = LayerBlock.NETWORK

    def __init__(self, size: int, inner: int) -> None:
        self.gate_proj, self.up_proj = (Linear(size, inner, bias=True) for _ in range(2))
        self.down_proj = Linear(inner, size, bias=True)
        self.act_fn = ActivationModule(Activation.SILU)

    def forward(self, x: Handle) -> Handle:
        down_proj: Handle = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class LayerScale(Module):
    def __init__(self, size: int) -> None:
        self.lambda1 = Weight(size)

    def forward(self, hidden_state: Handle) -> Handle:
        return hidden_state * self.operand(self.lambda1)


class Dinov2Layer(Module):
    """What it adds is scaled number by number."""

    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("hidden_size")
        inner = int(size * ratio(config, "mlp_ratio", default=4))
        self.norm1, self.norm2 = LayerNorm(size), LayerNorm(size)
        self.attention = Dinov2Attention(config, size)
        self.layer_scale1, self.layer_scale2 = LayerScale(size), LayerScale(size)
        self.drop_path = DropPath(config.number("drop_path_rate", default=0.0))
        if config.flag("use_swiglu_ffn"):
            self.mlp: Module = Dinov2SwiGLUFFN(size, (inner * 2 // 3 + 7) // 8 * 8)
        else:
            self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))

    def forward(self, hidden_states: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states, _ = self.attention(hidden_states)
        hidden_states = self.layer_scale1(hidden_states)
        hidden_states = self.drop_path(hidden_states) + residual
        residual = hidden_states
        hidden_states = self.norm2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.layer_scale2(hidden_states)
        hidden_states = self.drop_path(hidden_states) + residual
        return hidden_states


class Dinov2ForImageClassification(ImageClassification):
    """The first token beside the mean of the patches."""

    @property
    def num_inputs(self) -> int:
        """Both are joined."""
        return 2 * self.model.width

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """Registers are left out of the mean."""
        del others
        registers = getattr(self.model.children["embeddings"], "count", 0)
        cls_token = last_hidden_state.select(1)
        patch_tokens = last_hidden_state.narrow(last_hidden_state.shape[1] - 1 - registers, 1)
        return concatenate(cls_token, mean_of_tokens(patch_tokens), dim=1)


class Dinov2Model(ViTModel):
    prefix = "dinov2"
    pools = fixed = False
    layers_in = "encoder.layer"
    embeddings_class: type[ViTEmbeddings] = Dinov2Embeddings
    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: Dinov2ForImageClassification}

    def layer(self, config: ConfigReader, kind: Hashable) -> Module:  # noqa: ARG002
        """One of a kind."""
        return Dinov2Layer(config)


class Dinov2WithRegistersModel(Dinov2Model):
    prefix = "dinov2_with_registers"
    embeddings_class = RegisterEmbeddings
