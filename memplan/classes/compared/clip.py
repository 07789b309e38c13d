"""CLIP's and SigLIP's towers, for pictures and for texts.

(transformers 5.23, models/clip/modeling_clip.py, models/siglip/modeling_siglip.py)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import isqrt, prod
from typing import ClassVar

from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask, begin
from memplan.classes.pictures.parts import as_tokens
from memplan.classes.pictures.vit import Heads, two_linear
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended, attention_function, in_heads
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import (
    expanded,
    made_from,
    product,
    read_in_rows,
    repeated,
    softmax,
)
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart


def patches_across(config: ConfigReader) -> int:
    """Patches along one side of a square image."""
    patch_size = config.integer("patch_size")
    count = config.integer("image_size") // patch_size
    if not count:
        error = config.fail("image_size", f"is smaller than patch_size ({patch_size})")
        raise error
    return count


class SiglipAttention(Heads):
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear
    names = "k_proj", "v_proj", "q_proj"
    output = "out_proj"
    dropout_key = "attention_dropout"

    def __init__(self, config: ConfigReader, size: int, *, causal: bool = False) -> None:
        super().__init__(config, size)
        self.causal = causal

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        """All have one."""
        del config
        return True, True, True

    def projected(self, hidden_states: Handle) -> tuple[Handle, Handle, Handle]:
        """Queries, keys and values, each in heads as soon as it is there."""
        queries, keys, values = (
            in_heads(self.children[name](hidden_states), self.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        return queries, keys, values

    def forward(self, hidden_states: Handle, attention_mask: Handle | None) -> Attended:
        queries, keys, values = self.projected(hidden_states)
        attend = attention_function(self.run, causal=self.causal)
        attn_output, attn_weights = attend(queries, keys, values, attention_mask, self.probability)
        attn_output = attn_output.reshape(*hidden_states.shape[:2], -1)
        attn_output = self.out_proj(attn_output)
        return attn_output, attn_weights


class CLIPAttention(SiglipAttention):
    def projected(self, hidden_states: Handle) -> tuple[Handle, Handle, Handle]:
        """Cut into heads once all three are there; of keys, whose gradient their matrix copies, it is as good
        at once (``translating.stacks.projected_heads``)."""
        queries = self.q_proj(hidden_states)
        keys = in_heads(self.k_proj(hidden_states), self.head_dim)
        values = self.v_proj(hidden_states)
        queries = in_heads(queries, self.head_dim)
        values = in_heads(values, self.head_dim)
        return queries, keys, values


class CLIPEncoderLayer(Module):
    def __init__(self, config: ConfigReader, attention: Module) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.self_attn = attention
        self.layer_norm1 = LayerNorm(size)
        self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))
        self.layer_norm2 = LayerNorm(size)

    def forward(self, hidden_states: Handle, attention_mask: Handle | None) -> Handle:
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, attention_mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.layer_norm2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class ProjectedTexts(PictureTask):
    """A tower's vector, projected to the width that both share; the class has no loss of its own."""

    pooled = True
    name = "text_projection"

    def add_head(self, config: ConfigReader) -> None:
        """The projection."""
        width = config.integer("projection_dim")
        setattr(self, self.name, Linear(self.model.width, width))

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """What is projected."""
        del last_hidden_state
        found: Handle = self.children[self.name](others[0])
        return found.record


class ProjectedPictures(ProjectedTexts):
    name = "visual_projection"


class Tower(PictureModel):
    """One of CLIP's towers, by itself or in a model of two; its segments begin with its name."""

    attention_class: Callable[..., Module] = CLIPAttention
    causal = False
    recomputes = True
    post_layernorm: LayerNorm
    final_layer_norm: LayerNorm
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}
    last_norm = "post_layernorm"

    def add_layers(self, config: ConfigReader, name: str) -> None:
        """Declare its layers and the norm behind them."""
        self.width = config.integer("hidden_size")

        kinds = [0] * config.layers("num_hidden_layers")
        self.layers = LayerList(f"{name}.encoder.layers", kinds, lambda _: self.layer(config))
        self.children["encoder.layers"] = self.children.pop("layers")
        setattr(self, self.last_norm, LayerNorm(self.width))

    def layer(self, config: ConfigReader) -> CLIPEncoderLayer:
        """One of its layers."""
        attention = self.attention_class(config, self.width, causal=self.causal)
        return CLIPEncoderLayer(config, attention)

    def read(self) -> AbstractContextManager[object]:
        """What makes a vector of a picture leads nowhere where a task reads hidden states alone."""
        return nullcontext() if self.reads_pooled else UnreadGraph(self.run)

    def encoder(self, inputs_embeds: Handle, attention_mask: Handle | None = None) -> Handle:
        """``CLIPEncoder``."""
        hidden_states = inputs_embeds
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, attention_mask)
        return hidden_states


class VisionEmbeddings(Module):
    """Patches, behind a token where the tower has one, and positions looked up."""

    def __init__(self, config: ConfigReader, *, token: bool, bias: bool) -> None:
        self.size, patch = config.integer("hidden_size"), config.integer("patch_size")
        self.count = patches_across(config) ** 2 + token
        if token:
            self.class_embedding = Weight(self.size)
        channels = config.integer("num_channels")
        self.patch_embedding = Conv2d(channels, self.size, patch, stride=(patch, patch), bias=bias)
        self.position_embedding = Embedding(self.count, self.size)

    def forward(self, pixel_values: Handle) -> Handle:
        patch_embeds = self.patch_embedding(pixel_values.to(self.run.compute))
        patch_embeds = as_tokens(patch_embeds)
        embeddings = patch_embeds
        if "class_embedding" in self.weights:
            shape = patch_embeds.shape[0], 1, self.size
            class_embeds = expanded(self.operand(self.class_embedding), shape)
            embeddings = concatenate(class_embeds, patch_embeds, dim=1)
        return self.placed(embeddings)

    def placed(self, embeddings: Handle) -> Handle:
        """With their positions."""
        self.run.hold_buffer(self.count, DType.INT64)
        embeddings = embeddings + self.position_embedding((1, self.count))
        return read_in_rows(embeddings)


class CLIPVisionModel(Tower):
    """The norm behind its layers is the first token's alone."""

    prefix = tower = "vision_model"
    casts = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "Model": PictureStates, "ModelWithProjection": ProjectedPictures,
    }  # fmt: skip
    first_norm = "pre_layrnorm"
    pools = True
    """The first token is normed; else all are, once the texts are read."""

    def __init__(self, config: ConfigReader) -> None:
        self.context = config.optional_integer("num_patches") or patches_across(config) ** 2
        self.embeddings = VisionEmbeddings(config, token=True, bias=False)
        norm = LayerNorm(config.integer("hidden_size"))
        norm.segment = "vision_model.norms", ModelPart.OTHER
        setattr(self, self.first_norm, norm)
        self.add_layers(config, "vision_model")
        side, channels = config.integer("image_size"), config.integer("num_channels")
        self.picture = self.described(side, channels=channels, fixed=True)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embeddings(pixel_values)
        hidden_states = self.children[self.first_norm](hidden_states)
        last_hidden_state = self.encoder(hidden_states)
        if not self.pools:
            return (last_hidden_state,)
        begin(self, f"{self.tower}.norm", ModelPart.NORM, last_hidden_state)
        with self.read():
            pooled_output = last_hidden_state.select(1)
            pooled_output = self.post_layernorm(pooled_output)
        return last_hidden_state, pooled_output


class SiglipHead(Module):
    """``SiglipMultiheadAttentionPoolingHead``: one query of all patches."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        inner = config.integer("intermediate_size")
        self.probe = Weight(1, 1, size)
        self.attention = MultiheadAttention(size, config.integer("num_attention_heads"))
        self.layernorm = LayerNorm(size)
        self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))

    def forward(self, hidden_state: Handle) -> Handle:
        probe = repeated(self.operand(self.probe), hidden_state.shape[0])
        hidden_state = self.attention(probe, hidden_state)
        residual = hidden_state
        hidden_state = self.layernorm(hidden_state)
        hidden_state = residual + self.mlp(hidden_state)
        return hidden_state.select(1)


class PackedAttention(Module):
    """What ``torch.nn.MultiheadAttention(batch_first=True)`` has, and does with projected heads; its weights are asked for.

    (torch 2.13, nn/functional.py, ``multi_head_attention_forward``)
    """

    block = LayerBlock.ATTENTION

    def __init__(self, size: int, heads: int) -> None:
        self.num_heads = heads
        self.in_proj_weight, self.in_proj_bias = Weight(3 * size, size), Weight(3 * size)
        self.out_proj = Linear(size, size, bias=True)

    def attended(self, q: Handle, k: Handle, v: Handle, *masks: Handle) -> Handle:
        """Heads, scores and what is joined of them."""
        targets, batch, size = q.shape
        heads, sources = self.num_heads, k.shape[0]
        q = q.view(targets, batch * heads, size // heads).transpose(0, 1)
        k = k.view(sources, batch * heads, size // heads).transpose(0, 1)
        v = v.view(sources, batch * heads, size // heads).transpose(0, 1)
        q_scaled = q * 0.5
        attn_output_weights = self.scores(q_scaled, k, *masks)
        attn_output_weights = softmax(attn_output_weights)
        attn_output = matmul(attn_output_weights, v)
        attn_output = attn_output.transpose(0, 1).contiguous().view(targets * batch, size)
        attn_output = self.out_proj(attn_output)
        return attn_output.view(targets, batch, size).transpose(0, 1)

    def scores(self, q: Handle, k: Handle, *masks: Handle) -> Handle:
        """Of every pair; what masks them, who has any adds."""
        assert not masks
        return matmul(q, k.transpose(1, 2))


class MultiheadAttention(PackedAttention):
    """Of queries that are not the keys, and keys that are the values."""

    def forward(self, query: Handle, key: Handle) -> Handle:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
        q, k, v = self.projected(query, key)
        return self.attended(q, k, v)

    def projected(self, query: Handle, key: Handle) -> tuple[Handle, Handle, Handle]:
        """``_in_projection_packed`` of keys that are the values."""
        size = query.shape[-1]
        w_q, w_kv = self.operand(self.in_proj_weight).split(size, 2 * size, dim=0)
        b_q, b_kv = self.operand(self.in_proj_bias).split(size, 2 * size, dim=0)
        q_proj = product(query, w_q, b_q)
        kv_proj = product(key, w_kv, b_kv)
        kv_proj = kv_proj.view(*kv_proj.shape[:2], 2, size).permute(2, 0, 1, 3).contiguous()
        return q_proj, kv_proj.select(0), kv_proj.select(0)


class SiglipVisionModel(Tower):
    """Pooled by attention, where it is asked for."""

    prefix = tower = "vision_model"
    attention_class = SiglipAttention
    casts = True
    fixed = pools = True

    def mask(self, hidden_states: Handle) -> Handle | None:  # noqa: ARG002
        """What its layers' scores are masked by."""
        return None

    def __init__(self, config: ConfigReader) -> None:
        self.context = config.optional_integer("num_patches") or patches_across(config) ** 2
        self.embeddings = self.embedded(config)
        self.add_layers(config, "vision_model")
        if self.pools and config.flag("vision_use_head"):
            self.head = SiglipHead(config, self.width)
        channels = config.integer("num_channels")
        self.picture = self.described(self.side(config), channels=channels, fixed=self.fixed)

    def embedded(self, config: ConfigReader) -> Module:
        """What makes tokens of pictures."""
        return VisionEmbeddings(config, token=False, bias=True)

    def side(self, config: ConfigReader) -> int:
        """Of its pictures [pixels]."""
        return config.integer("image_size")

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embeddings(pixel_values)
        last_hidden_state = self.encoder(hidden_states, self.mask(hidden_states))
        begin(self, f"{self.tower}.norm", ModelPart.NORM, last_hidden_state)
        last_hidden_state = self.post_layernorm(last_hidden_state)
        if "head" not in self.children:
            return (last_hidden_state,)
        begin(self, f"{self.tower}.pooler", ModelPart.OTHER, last_hidden_state)
        with self.read():
            pooler_output = self.head(last_hidden_state)
        return last_hidden_state, pooler_output


class CutEmbeddings(Module):
    """Patches that come cut out; the table of positions is resized to each picture."""

    def __init__(self, config: ConfigReader) -> None:
        self.size, self.side = config.integer("hidden_size"), config.integer("patch_size")
        features = config.integer("num_channels") * self.side**2
        self.patch_embedding = Linear(features, self.size, bias=True)
        self.position_embedding = Embedding(config.integer("num_patches"), self.size)

    def forward(self, pixel_values: Handle) -> Handle:
        patch_embeds = self.patch_embedding(pixel_values.to(self.run.compute))
        resized_positional_embeddings = self.resized(*patch_embeds.shape[:2])
        embeddings = patch_embeds + resized_positional_embeddings
        return embeddings

    def resized(self, batch: int, count: int) -> Handle:
        """``interpolate`` for each picture: nothing of it is kept."""
        table = self.position_embedding.operand(self.position_embedding.weight)
        made = empty(self.run, (batch, count, self.size), table.dtype)
        self.run.record(
            OperationKind.INDEX, (table.record,), (made.record,), gradients=(Gradient.FRESH,),
            backward_scratch_bytes=made.record.storage.num_bytes,
        )  # fmt: skip
        return made


class Siglip2VisionModel(SiglipVisionModel):
    fixed = False

    def embedded(self, config: ConfigReader) -> Module:
        """Of patches."""
        self.patch = config.integer("patch_size")
        return CutEmbeddings(config)

    def side(self, config: ConfigReader) -> int:
        """As many patches as the table has, which is what its processor cuts (``max_num_patches``)."""
        return isqrt(config.integer("num_patches")) * self.patch

    def pixels_shape(self) -> tuple[int, ...]:
        """Of the batch's patches."""
        batch, channels, height, width = super().pixels_shape()
        return batch, height // self.patch * (width // self.patch), channels * self.patch**2


class TextEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, self.positions = (
            config.integer("hidden_size"), config.integer("max_position_embeddings"),
        )  # fmt: skip
        self.token_embedding = Embedding(config.integer("vocab_size"), size)
        self.position_embedding = Embedding(self.positions, size)

    def forward(self, input_ids: Handle) -> Handle:
        self.run.hold_buffer(self.positions, DType.INT64)
        inputs_embeds = self.token_embedding(input_ids.shape, input_ids)
        position_embeddings = self.position_embedding((1, input_ids.shape[1]))
        embeddings = inputs_embeds + position_embeddings
        return embeddings


class TextTower(Tower):
    """What all towers for texts are given."""

    prefix = tower = "text_model"
    last_norm = "final_layer_norm"

    def __init__(self, config: ConfigReader) -> None:
        self.vocab = config.integer("vocab_size")
        self.context = config.integer("max_position_embeddings")
        self.embeddings = TextEmbeddings(config)
        self.add_layers(config, "text_model")
        self.add_own(config)
        self.picture = self.described(0, channels=0)

    def add_own(self, config: ConfigReader) -> None:
        """What makes a vector of each text."""

    def inputs(self) -> Handle:
        """The batch's texts."""
        options = self.run.options
        shape = options.batch_size, min(options.seq_len, self.context)
        return Handle(self.run, from_batch(self.run, prod(shape), DType.INT64), shape)


class CLIPTextModel(TextTower):
    """Its vector is that of the token that ends a text."""

    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "Model": PictureStates, "ModelWithProjection": ProjectedTexts,
    }  # fmt: skip

    causal = True

    def add_own(self, config: ConfigReader) -> None:
        """Which token that is."""
        self.eos = config.integer("eos_token_id", default=0, minimum=0)

    def forward(self, input_ids: Handle) -> tuple[Handle, Handle]:
        hidden_states = self.embeddings(input_ids)
        attention_mask = causal_mask(self.run, *input_ids.shape)
        last_hidden_state = self.encoder(hidden_states, attention_mask)
        begin(self, "text_model.norm", ModelPart.NORM, last_hidden_state)
        last_hidden_state = self.final_layer_norm(last_hidden_state)
        pooled_output = self.pooled(last_hidden_state, input_ids)
        return last_hidden_state, pooled_output

    def pooled(self, last_hidden_state: Handle, input_ids: Handle) -> Handle:
        """The row of each text where its last token is found."""
        run, (batch, _, width) = self.run, last_hidden_state.shape
        numbers = made_by(run, OperationKind.ARANGE, (batch,), DType.INT64)
        seen = input_ids.apart(OperationKind.TO, dtype=DType.INT32)
        if self.eos != OLD_EOS:
            seen = seen.apart(OperationKind.EQ, dtype=DType.BOOL)
            seen = seen.apart(OperationKind.TO, dtype=DType.INT32)
        places = made_from(OperationKind.MAX, (batch,), DType.INT64, seen)
        return picked_rows(last_hidden_state, numbers, places, (batch, width))


OLD_EOS = 2
"""The number that configs had by mistake, with which the largest token is looked for."""


def picked_rows(x: Handle, numbers: Handle, places: Handle, shape: tuple[int, int]) -> Handle:
    """``x[numbers, places]``: both are kept, and the gradient is put into zeros."""
    made = empty(x.run, shape, x.dtype)
    x.run.record(
        OperationKind.INDEX, (x.record, numbers.record, places.record), (made.record,),
        saves=(numbers.record, places.record),
        gradients=(Gradient.FRESH, Gradient.NONE, Gradient.NONE),
    )  # fmt: skip
    return made


class SiglipTextModel(TextTower):
    """Its vector is the last token's, through a linear layer."""

    attention_class = SiglipAttention

    def add_own(self, config: ConfigReader) -> None:
        """That layer."""
        width = config.integer("projection_size", default=self.width)
        self.head = Linear(self.width, width, bias=True)

    def forward(self, input_ids: Handle) -> tuple[Handle, Handle]:
        hidden_states = self.embeddings(input_ids)
        last_hidden_state = self.encoder(hidden_states)
        begin(self, "text_model.norm", ModelPart.NORM, last_hidden_state)
        last_hidden_state = self.final_layer_norm(last_hidden_state)
        pooled_output = last_hidden_state.select(1)
        pooled_output = self.head(pooled_output)
        return last_hidden_state, pooled_output
