"""Segment Anything: an encoder with attention in windows, a prompt, and a decoder of masks; SAM-HQ; the encoder of others.

(transformers 5.23, models/sam/modeling_sam.py, models/sam_hq/modeling_sam_hq.py)
"""

from typing import ClassVar

from memplan.classes.pictures.base import (
    PictureModel,
    PictureStates,
    PictureTask,
    begin,
    begin_tower,
)
from memplan.classes.pictures.parts import InOrder
from memplan.classes.pictures.vitdet import get_rel_pos, window_partition, window_unpartition
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import few, pair, ratio
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import attention_function, scaled_dot_product_attention
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    spare,
)
from memplan.graph.modules.contractions import einsum, matmul
from memplan.graph.modules.functional import (
    added_both_ways,
    expanded,
    gather,
    made_from,
    repeated,
    softmax,
    total,
)
from memplan.graph.modules.grids import Conv2d, ConvTranspose2d
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart
from memplan.training.choices_of_kernels.kernels import AttentionKernel

POINTS = 2
"""Tokens of a prompt: a point and one that pads it, or two corners of a box."""
MASK_CHANNELS = 16
"""``mask_input_channels`` where the config has none (``SamPromptEncoderConfig``)."""
TWO_WAY_RATE = 2
"""``attention_downsample_rate`` of ``SamTwoWayAttentionBlock``, to which no config's is handed."""


class ChannelsNorm(LayerNorm):
    """``SamLayerNorm(data_format="channels_first")``."""

    def forward(self, x: Handle) -> Handle:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def two_layers(size: int, inner: int, active: Activation) -> InOrder:
    """``SamMLPBlock``."""
    made = InOrder(
        lin1=Linear(size, inner, bias=True), act=ActivationModule(active),
        lin2=Linear(inner, size, bias=True),
    )  # fmt: skip
    made.block = LayerBlock.NETWORK
    return made


class SamVisionAttention(Module):
    """With ``written_out`` the class has no kernel for its scores, whatever is asked for."""

    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, side: int, *, written_out: bool) -> None:
        size, self.num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        head_dim = config.divide("hidden_size", size, "num_attention_heads", self.num_heads)
        self.qkv = Linear(size, 3 * size, bias=config.flag("qkv_bias"))
        self.proj = Linear(size, size, bias=True)
        self.dropout = Dropout(config.number("attention_dropout", default=0.0))
        self.written_out = written_out
        if config.flag("use_rel_pos"):
            self.rel_pos_h = Weight(2 * side - 1, head_dim)
            self.rel_pos_w = Weight(2 * side - 1, head_dim)

    def forward(self, hidden_states: Handle) -> Handle:
        batch, height, width, size = hidden_states.shape
        heads, tokens = self.num_heads, height * width
        qkv = self.qkv(hidden_states).view(batch, tokens, 3, heads, size // heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        query, key, value = qkv.view(3, batch * heads, tokens, size // heads).unbind(0)
        if self.written_out or self.run.kernels.attention is AttentionKernel.EAGER:
            attn_output = self.eager(query, key, value, (height, width))
        else:
            attn_bias = None
            if "rel_pos_h" in self.weights:
                attn_bias = self.get_decomposed_rel_pos(query, (height, width))
                attn_bias = attn_bias.view(batch, heads, tokens, tokens)
            shape = batch, heads, tokens, size // heads
            query = query.view(*shape)
            key = key.view(*shape)
            value = value.view(*shape)
            attn_output = scaled_dot_product_attention(
                query, key, value, attn_bias, 0.0, causal=False
            )
        attn_output = attn_output.view(batch, heads, height, width, size // heads)
        attn_output = attn_output.permute(0, 2, 3, 1, 4).view(batch, height, width, size)
        attn_output = self.proj(attn_output)
        return attn_output

    def eager(self, query: Handle, key: Handle, value: Handle, sides: tuple[int, int]) -> Handle:
        """``SamVisionAttention.forward``, whose weights its caller holds."""
        attn_weights = matmul(query * 0.5, key.transpose(-2, -1))
        if "rel_pos_h" in self.weights:
            decomposed_rel_pos = self.get_decomposed_rel_pos(query, sides)
            decomposed_rel_pos = decomposed_rel_pos.view(*attn_weights.shape)
            attn_weights = attn_weights + decomposed_rel_pos
        attn_weights = softmax(attn_weights, dtype=DType.FP32).to(query.dtype)
        attn_probs = self.dropout(attn_weights)
        return matmul(attn_probs, value)

    def get_decomposed_rel_pos(self, query: Handle, sides: tuple[int, int]) -> Handle:
        """Queries times a row for each distance down, and across, added to one another."""
        height, width = sides
        relative_height = get_rel_pos(height, self.operand(self.rel_pos_h), resized=True)
        relative_width = get_rel_pos(width, self.operand(self.rel_pos_w), resized=True)
        batch, _, dim = query.shape
        reshaped_query = query.view(batch, height, width, dim)
        rel_h = einsum("bhwc,hkc->bhwk", reshaped_query, relative_height)
        rel_w = einsum("bhwc,wkc->bhwk", reshaped_query, relative_width)
        decomposed_rel_pos = added_both_ways(rel_h, rel_w)
        return decomposed_rel_pos


class SamVisionLayer(Module):
    def __init__(self, config: ConfigReader, window: int, *, written_out: bool) -> None:
        size = config.integer("hidden_size")
        inner = config.optional_integer("mlp_dim")
        if inner is None:
            inner = int(size * ratio(config, "mlp_ratio", default=4))
        whole = config.integer("image_size") // config.integer("patch_size")
        self.window_size = window
        self.layer_norm1 = LayerNorm(size)
        self.attn = SamVisionAttention(config, window or whole, written_out=written_out)
        self.layer_norm2 = LayerNorm(size)
        self.mlp = two_layers(size, inner, tower_activation(config, "hidden_act"))

    def forward(self, hidden_states: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        sides, padded_sides = hidden_states.shape[1:3], (0, 0)
        if self.window_size:
            hidden_states, padded_sides = window_partition(hidden_states, self.window_size)
        hidden_states = self.attn(hidden_states)
        if self.window_size:
            hidden_states = window_unpartition(
                hidden_states, self.window_size, padded_sides, (sides[0], sides[1])
            )
        hidden_states = residual + hidden_states
        layernorm_output = self.layer_norm2(hidden_states)
        hidden_states = hidden_states + self.mlp(layernorm_output)
        return hidden_states


class SamVisionNeck(InOrder):
    def __init__(self, size: int, out: int) -> None:
        super().__init__(
            conv1=Conv2d(size, out, 1, bias=False), layer_norm1=ChannelsNorm(out),
            conv2=Conv2d(out, out, 3, padding=1, bias=False), layer_norm2=ChannelsNorm(out),
        )  # fmt: skip

    def forward(self, x: Handle) -> Handle:
        return super().forward(x.permute(0, 3, 1, 2))


class SamPatchEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        patch = pair(config, "patch_size")
        channels, size = config.integer("num_channels"), config.integer("hidden_size")
        self.projection = Conv2d(channels, size, *patch, stride=patch)

    def forward(self, pixel_values: Handle) -> Handle:
        return self.projection(pixel_values).permute(0, 2, 3, 1)


class SamVisionEncoder(PictureModel):
    """It gives what its neck makes, and before that what each layer over whole pictures gave."""

    written_out = False
    keeps_wide = False
    prefix = ""
    tower = "vision_encoder"

    def __init__(self, config: ConfigReader) -> None:
        self.width = config.integer("hidden_size")
        grid = config.integer("image_size") // config.integer("patch_size")
        self.grid = (grid, grid)
        self.patch_embed = SamPatchEmbeddings(config)
        if config.flag("use_abs_pos"):
            self.pos_embed = Weight(1, *self.grid, self.width)
        window = config.integer("window_size", minimum=0)
        wide = self.wide_layers(config)
        self.first_wide = min(wide, default=-1)
        # What a layer is given that masks are made of too has two gradients: it is like none of those behind it.
        apart = {*wide, self.first_wide + 1} if self.keeps_wide else set()
        kinds = [
            (0 if number in wide else window, number * (number in apart))
            for number in range(config.layers("num_hidden_layers"))
        ]
        self.layers = LayerList(
            f"{self.tower}.layers", kinds,
            lambda kind: SamVisionLayer(config, kind[0], written_out=self.written_out),
        )  # fmt: skip
        self.outputs = config.integer("output_channels")
        self.neck = SamVisionNeck(self.width, self.outputs)
        self.neck.segment = f"{self.tower}.neck", ModelPart.OTHER
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels, fixed=True)

    def wide_layers(self, config: ConfigReader) -> set[int]:
        """Layers that see a whole picture, of which masks are made where they are read.

        Raises ``ConfigError`` where there is none to read.
        """
        count = config.layers("num_hidden_layers")
        wide = set(config.integers("global_attn_indexes"))
        if self.keeps_wide and not wide.intersection(range(count)):
            msg = f"must name one of the {count} layers: masks are made of what it sees"
            error = config.fail("global_attn_indexes", msg)
            raise error
        return wide

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.patch_embed(pixel_values)
        if "pos_embed" in self.weights:
            hidden_states = hidden_states + self.operand(self.pos_embed)
        intermediate_embeddings = []
        for layer_module in self.layers:
            hidden_states = layer_module(hidden_states)
            if self.keeps_wide and not layer_module.kind[0]:
                intermediate_embeddings.append(hidden_states)
        hidden_states = self.neck(hidden_states)
        return *intermediate_embeddings, hidden_states


class SamHQVisionEncoder(SamVisionEncoder):
    keeps_wide = True


class SamPositionalEmbedding(Module):
    def __init__(self, features: int) -> None:
        self.positional_embedding = Weight(2, features)

    def forward(self, rows: int) -> Handle:
        """Of so many places."""
        run, matrix = self.run, self.parameter(self.positional_embedding)
        dtype = run.autocast or matrix.dtype
        coordinates = empty(run, (rows, matrix.shape[1]), dtype)
        run.record(
            OperationKind.MATMUL, (run.cast_weight(matrix),), (coordinates.record,),
            gradients=(Gradient.FRESH,),
        )  # fmt: skip
        coordinates = coordinates * 6.28
        sines = coordinates.unary(OperationKind.SIN)
        return concatenate(sines, coordinates.unary(OperationKind.COS))


class SamPromptEncoder(Module):
    """One point or box a picture, and no mask."""

    def __init__(self, config: ConfigReader, shared: SamPositionalEmbedding | None) -> None:
        self.size = size = config.integer("hidden_size")
        wide = config.integer("mask_input_channels", default=MASK_CHANNELS)
        if shared is not None:
            self.shared_embedding = SamPositionalEmbedding(1)
            self.shared_embedding.positional_embedding = shared.positional_embedding
        self.mask_embed = InOrder(
            conv1=Conv2d(1, wide // 4, 2), conv2=Conv2d(wide // 4, wide, 2),
            conv3=Conv2d(wide, size, 1), layer_norm1=LayerNorm(wide // 4),
            layer_norm2=LayerNorm(wide // 4 * 4),
        )  # fmt: skip
        self.no_mask_embed = Embedding(1, size)
        self.point_embed = self.points(config)
        self.not_a_point_embed = Embedding(1, size)

    def points(self, config: ConfigReader) -> Module:
        """A row for each kind of point."""
        count = config.integer("num_point_embeddings")
        return InOrder(**{f"_{number}": Embedding(1, self.size) for number in range(count)})

    def forward(self, image_embeddings: Handle) -> tuple[Handle, Handle]:
        spare(self.mask_embed)
        spare(self.point_embed)
        given = self.operand(self.not_a_point_embed.weight)
        sparse = empty(self.run, (image_embeddings.shape[0], 1, POINTS, self.size), given.dtype)
        self.run.record(
            OperationKind.WHERE, (given.record,), (sparse.record,), gradients=(Gradient.FRESH,)
        )
        return sparse, expanded(self.operand(self.no_mask_embed.weight), image_embeddings.shape)


class SamAttention(Module):
    """Projected to a width, and back."""

    block = LayerBlock.ATTENTION

    def __init__(self, size: int, heads: int, rate: int, source: int = 0) -> None:
        inner, self.num_heads = size // rate, heads
        self.q_proj = Linear(size, inner, bias=True)
        self.k_proj, self.v_proj = (Linear(source or size, inner, bias=True) for _ in range(2))
        self.out_proj = Linear(inner, size, bias=True)

    def separate_heads(self, x: Handle) -> Handle:
        """Of one prompt a picture."""
        batch, prompts, tokens, channel = x.shape
        heads = self.num_heads
        return x.view(batch * prompts, tokens, heads, channel // heads).transpose(1, 2)

    def forward(self, query: Handle, key: Handle, value: Handle) -> Handle:
        query = self.q_proj(query)
        key = self.k_proj(key)
        value = self.v_proj(value)
        batch, prompts, tokens, inner = query.shape
        query = self.separate_heads(query)
        key = self.separate_heads(key)
        value = self.separate_heads(value)
        attend = attention_function(self.run, causal=False)
        attn_output, _ = attend(query, key, value, None, 0.0)
        attn_output = attn_output.view(batch, prompts, tokens, inner)
        attn_output = self.out_proj(attn_output)
        return attn_output


class SamTwoWayAttentionBlock(Module):
    """Tokens see the picture, and the picture the tokens."""

    def __init__(self, config: ConfigReader, size: int, heads: int) -> None:
        rate = self.rate(config)
        self.self_attn = SamAttention(size, heads, 1)
        self.layer_norm1 = LayerNorm(size)
        self.cross_attn_token_to_image = SamAttention(size, heads, rate)
        self.layer_norm2 = LayerNorm(size)
        self.mlp = self.network(config, size)
        self.layer_norm3, self.layer_norm4 = LayerNorm(size), LayerNorm(size)
        self.cross_attn_image_to_token = SamAttention(size, heads, rate)

    def rate(self, config: ConfigReader) -> int:  # noqa: ARG002
        """How much narrower one sees the other."""
        return TWO_WAY_RATE

    def network(self, config: ConfigReader, size: int) -> Module:
        """What tokens pass in between."""
        active = tower_activation(config, "hidden_act", default="relu")
        return two_layers(size, config.integer("mlp_dim"), active)

    def forward(
        self, queries: Handle, keys: Handle, query_pos: Handle, key_pos: Handle, first: bool
    ) -> tuple[Handle, Handle, Handle]:
        if first:
            queries = self.self_attn(queries, queries, queries)
        else:
            query = queries + query_pos
            attn_out = self.self_attn(query, query, queries)
            queries = queries + attn_out
        queries = self.layer_norm1(queries)
        query = queries + query_pos
        key = keys + key_pos
        attn_out = self.cross_attn_token_to_image(query, key, keys)
        queries = queries + attn_out
        queries = self.layer_norm2(queries)
        mlp_out = self.mlp(queries)
        queries = queries + mlp_out
        queries = self.layer_norm3(queries)
        query = queries + query_pos
        key = keys + key_pos
        attn_out = self.cross_attn_image_to_token(key, query, queries)
        keys = keys + attn_out
        keys = self.layer_norm4(keys)
        return queries, keys, attn_out


class SamTwoWayTransformer(Module):
    """Its layers are plain modules, which are not run again."""

    layer_class = SamTwoWayAttentionBlock

    def __init__(self, config: ConfigReader, size: int) -> None:
        heads = config.integer("num_attention_heads", default=8)
        self.num_layers = config.layers("num_hidden_layers")
        for number in range(self.num_layers):
            setattr(self, f"layers.{number}", self.layer_class(config, size, heads))
        rate = config.integer("attention_downsample_rate")
        self.final_attn_token_to_image = SamAttention(size, heads, rate)
        self.layer_norm_final_attn = LayerNorm(size)

    def forward(
        self, point_embeddings: Handle, image_embeddings: Handle, image_positions: Handle
    ) -> tuple[Handle, Handle]:
        image_embeddings = _rows(image_embeddings)
        image_positions = _rows(image_positions)
        queries, keys = point_embeddings, image_embeddings
        for number in range(self.num_layers):
            layer = self.children[f"layers.{number}"]
            queries, keys, _ = layer(queries, keys, point_embeddings, image_positions, not number)
        query = queries + point_embeddings
        key = keys + image_positions
        attn_out = self.final_attn_token_to_image(query, key, keys)
        queries = queries + attn_out
        queries = self.layer_norm_final_attn(queries)
        return queries, keys


def _rows(picture: Handle) -> Handle:
    """``picture.flatten(2).transpose(1, 2).unsqueeze(1)``."""
    batch, channels, height, width = picture.shape
    return picture.view(batch, channels, height * width).transpose(1, 2).unsqueeze(1)


class SamFeedForward(InOrder):
    """Two linear layers at least."""

    def __init__(self, size: int, inner: int, out: int, num_layers: int) -> None:
        middle = {
            f"layers.{number}": Linear(inner, inner, bias=True) for number in range(num_layers - 2)
        }
        super().__init__(
            activation=ActivationModule(Activation.RELU), proj_in=Linear(size, inner, bias=True),
            proj_out=Linear(inner, out, bias=True), **middle,
        )  # fmt: skip

    def forward(self, hidden_states: Handle) -> Handle:
        activation, first, last, *layers = self.children.values()
        for each in (first, *layers):
            hidden_states = activation(each(hidden_states))
        hidden_states = last(hidden_states)
        return hidden_states


class SamMaskDecoder(Module):
    """Masks of all tokens but the first, which only a class that is asked for a single one returns."""

    transformer_class = SamTwoWayTransformer

    def __init__(self, config: ConfigReader) -> None:
        self.size = size = config.integer("hidden_size")
        self.count = config.integer("num_multimask_outputs") + 1
        self.iou_token, self.mask_tokens = Embedding(1, size), Embedding(self.count, size)
        self.transformer = self.transformer_class(config, size)
        self.upscale_conv1 = ConvTranspose2d(size, size // 4, 2)
        self.upscale_conv2 = ConvTranspose2d(size // 4, size // 8, 2)
        self.upscale_layer_norm = ChannelsNorm(size // 4)
        self.activation = ActivationModule(Activation.GELU)
        for number in range(self.count):
            setattr(self, f"output_hypernetworks_mlps.{number}", self.hypernetwork())
        inner, depth = config.integer("iou_head_hidden_dim"), few(config, "iou_head_depth")
        self.iou_prediction_head = SamFeedForward(size, inner, self.count, depth)

    def hypernetwork(self) -> SamFeedForward:
        """What a mask is made of by a token."""
        return SamFeedForward(self.size, self.size, self.size // 8, 3)

    def tokens(self, batch: int, prompt: Handle) -> Handle:
        """Those that are asked, before the prompt's."""
        names = [each for each in ("iou_token", "mask_tokens", "hq_token") if each in self.children]
        weights = [self.operand(self.children[each].weights["weight"]) for each in names]
        output_tokens = concatenate(*weights, dim=0)
        rows, size = output_tokens.shape
        output_tokens = repeated(output_tokens.view(1, 1, rows, size), batch)
        return concatenate(output_tokens, prompt, dim=2)

    def looked(
        self, image_embeddings: Handle, image_positions: Handle, prompt: Handle, dense: Handle
    ) -> tuple[Handle, ...]:
        """The tokens behind the transformer, the picture widened fourfold, and what the frame names beside."""
        batch, channels, height, width = image_embeddings.shape
        point_embeddings = self.tokens(batch, prompt)
        image_embeddings = image_embeddings + dense
        image_embeddings = repeated(image_embeddings, 1)
        image_positions = repeated(image_positions, 1)
        point_embedding, image_embeddings = self.transformed(
            point_embeddings, image_embeddings, image_positions
        )
        image_embeddings = image_embeddings.transpose(2, 3).view(batch, channels, height, width)
        upscaled_embedding = self.upscale_conv1(image_embeddings)
        upscaled_embedding = self.activation(self.upscale_layer_norm(upscaled_embedding))
        upscaled_embedding = self.activation(self.upscale_conv2(upscaled_embedding))
        return (
            point_embedding, upscaled_embedding, point_embeddings, image_embeddings, image_positions,
        )  # fmt: skip

    def transformed(
        self, points: Handle, image_embeddings: Handle, image_positions: Handle
    ) -> tuple[Handle, Handle]:
        """The tokens, and the picture as they have seen it."""
        found: tuple[Handle, Handle] = self.transformer(points, image_embeddings, image_positions)
        return found

    def hyper_in(self, point_embedding: Handle, names: list[str]) -> Handle:
        """A vector of each token, side by side."""
        size, made = self.size, []
        spare(self.iou_prediction_head)
        for name in names:
            token = point_embedding.narrow(1, 2).view(-1, 1, size)
            made.append(self.children[name](token).unsqueeze(2))
        return concatenate(*made, dim=2)

    @property
    def names(self) -> list[str]:
        """Of the tokens' networks."""
        return [f"output_hypernetworks_mlps.{number}" for number in range(self.count)]

    def forward(
        self,
        image_embeddings: Handle,
        image_positions: Handle,
        prompt: Handle,
        dense: Handle,
        intermediate: list[Handle],
    ) -> Handle:
        del intermediate
        point_embedding, upscaled, *_named = self.looked(
            image_embeddings, image_positions, prompt, dense
        )
        hyper_in = self.hyper_in(point_embedding, self.names)
        masks = matmul(hyper_in, _flat(upscaled))
        return masks.narrow(self.count - 1, 2)


def _flat(picture: Handle) -> Handle:
    """``picture.reshape(batch, prompts, channels, height * width)``."""
    batch, channels, height, width = picture.shape
    return picture.view(batch, 1, channels, height * width)


class SamHQMaskDecoder(SamMaskDecoder):
    """One token more, whose mask is made of the encoder's early and late features, and added to the others in
    order of merit."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        size, vision = self.size, config.integer("vit_dim")
        self.hq_token, self.hq_mask_mlp = Embedding(1, size), self.hypernetwork()
        self.compress_vit_conv1 = ConvTranspose2d(vision, size, 2)
        self.compress_vit_norm = ChannelsNorm(size)
        self.compress_vit_conv2 = ConvTranspose2d(size, size // 8, 2)
        self.encoder_conv1 = ConvTranspose2d(size, size // 4, 2)
        self.encoder_norm = ChannelsNorm(size // 4)
        self.encoder_conv2 = ConvTranspose2d(size // 4, size // 8, 2)
        self.mask_conv1 = Conv2d(size // 8, size // 4, 3, padding=1)
        self.mask_norm = ChannelsNorm(size // 4)
        self.mask_conv2 = Conv2d(size // 4, size // 8, 3, padding=1)

    def transformed(
        self, points: Handle, image_embeddings: Handle, image_positions: Handle
    ) -> tuple[Handle, Handle]:
        """The picture stays as it was."""
        point_embedding, _ = self.transformer(points, image_embeddings, image_positions)
        return point_embedding, image_embeddings

    def forward(
        self,
        image_embeddings: Handle,
        image_positions: Handle,
        prompt: Handle,
        dense: Handle,
        intermediate: list[Handle],
    ) -> Handle:
        vit_features = intermediate[0].permute(0, 3, 1, 2).contiguous()
        embed_encode = self.encoder_conv1(image_embeddings)
        embed_encode = self.activation(self.encoder_norm(embed_encode))
        embed_encode = self.encoder_conv2(embed_encode)
        compressed_vit_features = self.compress_vit_conv1(vit_features)
        compressed_vit_features = self.activation(self.compress_vit_norm(compressed_vit_features))
        compressed_vit_features = self.compress_vit_conv2(compressed_vit_features)
        hq_features = embed_encode + compressed_vit_features
        point_embedding, upscaled, *_named = self.looked(
            image_embeddings, image_positions, prompt, dense
        )
        upscaled_hq = self.mask_conv1(upscaled)
        upscaled_hq = self.activation(self.mask_norm(upscaled_hq))
        upscaled_hq = self.mask_conv2(upscaled_hq)
        if hq_features.shape[0] == 1:
            hq_features = repeated(hq_features, 1)
        upscaled_hq = upscaled_hq + hq_features
        hyper_in = self.hyper_in(point_embedding, [*self.names, "hq_mask_mlp"])
        upscaled = _flat(upscaled)
        upscaled_hq = _flat(upscaled_hq)
        masks_sam = matmul(hyper_in.narrow(self.count, 2), upscaled)
        masks_hq = matmul(hyper_in.narrow(1, 2), upscaled_hq)
        masks = concatenate(masks_sam, masks_hq, dim=2)
        masks_sam = masks.narrow(self.count - 1, 2)
        rows = masks_sam.shape[0], 1, self.count - 1, 1
        sort_indices = made_from(OperationKind.SORT, rows, DType.INT64, masks_sam)
        masks_sam = gather(masks_sam, sort_indices, dim=2)
        masks_hq = masks.narrow(1, 2)
        masks = masks_sam + masks_hq
        return masks


class Segmented(PictureStates):
    begins_head = False
    meant = "one point or box a picture and no mask as its prompt, masks kept until backward, their sum as the loss"


class SegmentedFinely(Segmented):
    """Its masks are no view of what they are picked from, and go with the outputs before backward."""

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """Their sum."""
        del others
        return total(last_hidden_state.view(1, -1)).record


class SamModel(PictureModel):
    prefix = ""
    tower = "shared_image_embedding"
    recomputes = True
    bare: ClassVar[type[PictureTask]] = Segmented
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": Segmented}
    encoder_class: type[SamVisionEncoder] = SamVisionEncoder
    decoder_class: type[SamMaskDecoder] = SamMaskDecoder

    def __init__(self, config: ConfigReader) -> None:
        vision, prompts, masks = parts_of(config, "vision", "prompt_encoder", "mask_decoder")
        self.shared_image_embedding = SamPositionalEmbedding(vision.integer("num_pos_feats"))
        self.vision_encoder = self.encoder_class(vision)
        self.prompt_encoder = SamPromptEncoder(prompts, self.shared_image_embedding)
        self.mask_decoder = self.decoder_class(masks)
        self.width, self.picture = self.vision_encoder.width, self.vision_encoder.picture

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        batch, grid = pixel_values.shape[0], self.vision_encoder.grid
        image_positions = self.shared_image_embedding(grid[0] * grid[1])
        image_positions = image_positions.view(1, *grid, -1).permute(0, 3, 1, 2)
        image_positions = repeated(image_positions, batch)
        self.run.finish(image_positions.record)
        begin_tower(self, self.vision_encoder.tower)
        vision_outputs = self.vision_encoder(pixel_values)
        *intermediate_embeddings, image_embeddings = vision_outputs
        begin(self, "mask_decoder", ModelPart.OTHER, image_embeddings)
        sparse_embeddings, dense_embeddings = self.prompt_encoder(image_embeddings)
        low_res_masks = self.mask_decoder(
            image_embeddings, image_positions, sparse_embeddings, dense_embeddings,
            intermediate_embeddings,
        )  # fmt: skip
        return (low_res_masks,)


class SamHQModel(SamModel):
    bare = SegmentedFinely
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": SegmentedFinely}
    encoder_class = SamHQVisionEncoder
    decoder_class = SamHQMaskDecoder


def parts_of(config: ConfigReader, *keys: str) -> list[ConfigReader]:
    """Readers of nested configs; SAM 2's vision part may be of any type, and usually is its own."""
    return [
        read_part(config, PartSpec(key=f"{key}_config", model_type="sam2_vision_model")).reader
        for key in keys
    ]


class SamVisionModel(SamVisionEncoder):
    """The encoder by itself, as another model's tower: a module of its own in it."""
