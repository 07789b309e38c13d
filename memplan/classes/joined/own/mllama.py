"""Llama 3.2 Vision: pictures in tiles, through layers and gated ones, to which some of the text's layers attend.

(transformers 5.23, models/mllama/modeling_mllama.py)
"""

from typing import Any, ClassVar

from memplan.classes.joined.base import JoinedModel
from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask, begin
from memplan.classes.pictures.parts import as_tokens
from memplan.classes.pictures.vit import Heads, two_linear
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, attention_function, in_heads
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import expanded, made_from, padded
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import KeptLayers
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.joining import Joining
from memplan.model.parameters import ModelPart, WeightRole
from memplan.units import round_up

TOKENS_MULTIPLE = 8
"""A tile's tokens are padded to a multiple of this."""
COLOURS = 3


class MllamaVisionAttention(Heads):
    output = ""

    def __init__(self, config: ConfigReader, size: int) -> None:
        super().__init__(config, size)
        self.o_proj = Linear(size, size, role=WeightRole.ATTENTION_OUTPUT)

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        del config
        return False, False, False

    def forward(self, hidden_states: Handle, attention_mask: Handle) -> Attended:
        query, key, value = (self.children[name](hidden_states) for name in self.names)
        query = in_heads(query, self.head_dim)
        key = in_heads(key, self.head_dim)
        value = in_heads(value, self.head_dim)
        attend = attention_function(self.run, causal=False)
        attn_output, attn_weights = attend(query, key, value, attention_mask, 0.0)
        attn_output = attn_output.view(*hidden_states.shape[:2], -1)
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


class MllamaVisionEncoderLayer(Module):
    def __init__(self, config: ConfigReader, size: int, *, gated: bool = False) -> None:
        self.self_attn = MllamaVisionAttention(config, size)
        inner = config.integer("intermediate_size")
        self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))
        self.input_layernorm, self.post_attention_layernorm = LayerNorm(size), LayerNorm(size)
        if gated:
            self.gate_attn, self.gate_ffn = Weight(1), Weight(1)

    def forward(self, hidden_states: Handle, attention_mask: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, attention_mask)
        hidden_states = self.gated("gate_attn", hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.gated("gate_ffn", hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states

    def gated(self, name: str, hidden_states: Handle) -> Handle:
        """Times a gate, where the layer has some."""
        if name not in self.weights:
            return hidden_states
        return self.operand(self.weights[name]).tanh() * hidden_states


class MllamaPrecomputedAspectRatioEmbedding(Module):
    """A row for each shape of a picture."""

    def __init__(self, shapes: int, tiles: int, size: int) -> None:
        self.tiles = tiles
        self.gate = Weight(1)
        self.embedding = Embedding(shapes + 1, tiles * size)

    def forward(self, hidden_states: Handle, aspect_ratio_ids: Handle) -> Handle:
        embeddings = self.embedding(aspect_ratio_ids.shape, aspect_ratio_ids)
        embeddings = embeddings.view(-1, self.tiles, 1, hidden_states.shape[-1])
        embeddings = embeddings * self.operand(self.gate).tanh()
        return hidden_states + embeddings


class MllamaPrecomputedPositionEmbedding(Module):
    """One table for all tiles, and one for each shape's."""

    def __init__(self, shapes: int, tiles: int, count: int, size: int) -> None:
        self.gate, self.embedding = Weight(1), Weight(count, size)
        self.tile_embedding = Embedding(shapes + 1, tiles * count * size)

    def forward(self, hidden_states: Handle, aspect_ratio_ids: Handle) -> Handle:
        rest = self.operand(self.gate).tanh() * 1.0
        gated_position_embedding = rest * self.operand(self.embedding)
        hidden_states = hidden_states + gated_position_embedding
        tile_position_embedding = self.tile_embedding(aspect_ratio_ids.shape, aspect_ratio_ids)
        tile_position_embedding = tile_position_embedding.view(*hidden_states.shape)
        gated_tile_position_embedding = self.operand(self.gate).tanh() * tile_position_embedding
        return hidden_states + gated_tile_position_embedding


def num_shapes(tiles: int) -> int:
    """Ways to lay at most so many tiles out in rows and columns.

    >>> num_shapes(4)
    8
    """
    return sum(1 for rows in range(1, tiles + 1) for _ in range(1, tiles // rows + 1))


class MllamaVisionModel(PictureModel):
    prefix = tower = "vision_model"
    casts = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}

    def __init__(self, config: ConfigReader) -> None:
        size, self.tiles = config.integer("hidden_size"), config.integer("max_num_tiles")
        shapes = len(config.sequence("supported_aspect_ratios")) or num_shapes(self.tiles)
        image, patch = pair(config, "image_size"), pair(config, "patch_size")
        self.count = (image[0] // patch[0]) * (image[1] // patch[1]) + 1
        channels = config.integer("num_channels", default=COLOURS)
        self.class_embedding = Weight(size)
        self.patch_embedding = Conv2d(channels, size, *patch, stride=patch, bias=False)
        self.gated_positional_embedding = MllamaPrecomputedPositionEmbedding(
            shapes, self.tiles, self.count, size
        )
        for place in ("pre", "post"):
            made = MllamaPrecomputedAspectRatioEmbedding(shapes, self.tiles, size)
            setattr(self, f"{place}_tile_positional_embedding", made)
        self.layernorm_pre, self.layernorm_post = LayerNorm(size), LayerNorm(size)
        self.add_layers(config, size)
        self.picture = self.described(*image, channels=channels, fixed=True)

    def add_layers(self, config: ConfigReader, size: int) -> None:
        """Two lists, which transformers checkpoints in no job; some results of the first are read at the end."""
        depth = config.layers("num_hidden_layers")
        self.layers = KeptLayers(
            "vision_model.layers", [None] * depth, lambda _: MllamaVisionEncoderLayer(config, size)
        )
        self.children["transformer.layers"] = self.children.pop("layers")
        self.layers.capture(*range(1, depth + 1), is_read=True)
        count = config.layers("num_global_layers")
        self.global_layers = KeptLayers(
            "vision_model.global_layers", [None] * count,
            lambda _: MllamaVisionEncoderLayer(config, size, gated=True),
        )  # fmt: skip
        self.children["global_transformer.layers"] = self.children.pop("global_layers")
        self.read: list[int] = []
        for number in config.integers("intermediate_layers_indices"):
            if not -depth <= number < depth:
                error = config.fail(
                    "intermediate_layers_indices", f"{number}: there are {depth} layers"
                )
                raise error
            self.read.append(number % depth + 1)
        self.width = config.integer("vision_output_dim")

    def mask(self, pictures: int, length: int) -> Handle:
        """``_prepare_aspect_ratio_attention_mask``: a product that says of every pair whether to see it."""
        run, rows = self.run, self.tiles * length
        dtype = run.autocast or run.compute
        given = Handle(
            run, from_batch(run, pictures * self.tiles, DType.INT64), (pictures, self.tiles)
        )
        attention_mask = made_from(OperationKind.REPEAT, (pictures, rows, 1), run.compute, given)
        attention_mask = attention_mask.apart(OperationKind.MUL_SCALAR).to(dtype)
        pairs = made_from(OperationKind.MATMUL, (pictures, 1, rows, rows), dtype, attention_mask)
        del attention_mask
        return pairs.apart(OperationKind.MUL_SCALAR)

    def embedded(self, pixel_values: Handle, aspect_ratio_ids: Handle) -> Handle:
        """Patches of tiles, placed, a token before those of each tile, padded."""
        pictures = aspect_ratio_ids.shape[0]
        patch_embeds = self.patch_embedding(pixel_values.to(self.run.compute))
        hidden_states = as_tokens(patch_embeds)
        number, patches, dim = hidden_states.shape
        hidden_states = hidden_states.reshape(pictures, self.tiles, patches, dim)
        hidden_states = self.placed("pre", hidden_states, aspect_ratio_ids)
        hidden_states = hidden_states.reshape(number, patches, dim)
        class_embedding = expanded(self.operand(self.class_embedding), (number, 1, dim))
        hidden_states = concatenate(class_embedding, hidden_states, dim=1)
        del class_embedding
        hidden_states = hidden_states.reshape(pictures, self.tiles, self.count, dim)
        hidden_states = self.gated_positional_embedding(hidden_states, aspect_ratio_ids)
        hidden_states = self.layernorm_pre(hidden_states)
        length = round_up(self.count, TOKENS_MULTIPLE)
        return padded(hidden_states, (pictures, self.tiles, length, dim))

    def placed(self, place: str, hidden_states: Handle, aspect_ratio_ids: Handle) -> Handle:
        """With what stands for each tile's place."""
        module = self.children[f"{place}_tile_positional_embedding"]
        made: Handle = module(hidden_states, aspect_ratio_ids)
        return made

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        run = self.run
        pictures = pixel_values.shape[0] // self.tiles
        aspect_ratio_ids = Handle(run, from_batch(run, pictures, DType.INT64), (pictures, 1))
        hidden_states = self.embedded(pixel_values, aspect_ratio_ids)
        _, _, length, dim = shape = hidden_states.shape
        attention_mask = self.mask(pictures, length)
        hidden_states = hidden_states.view(pictures, -1, dim)
        last = hidden_states
        for layer in self.layers:
            last = layer(last, attention_mask)
        encoder_states = self.layers.take_states()
        begin(self, f"{self.tower}.global_embed", ModelPart.EMBEDDING, last)
        hidden_states = last
        del last
        hidden_states = self.layernorm_post(hidden_states)
        hidden_states = self.placed("post", hidden_states.view(*shape), aspect_ratio_ids)
        hidden_states = hidden_states.view(pictures, -1, dim)
        for layer in self.global_layers:
            hidden_states = layer(hidden_states, attention_mask)
        begin(self, f"{self.tower}.states", ModelPart.OTHER, hidden_states)
        hidden_states = hidden_states.view(*shape).narrow(self.count, 2)
        intermediate = concatenate(*[encoder_states[each].unsqueeze(-1) for each in self.read])
        intermediate = intermediate.view(*shape[:3], -1).narrow(self.count, 2)
        return (concatenate(hidden_states, intermediate),)


class MllamaModel(JoinedModel):
    """What pictures became, its text is given before its tokens are embedded."""

    text = PartSpec(key="text_config")
    sees = "vision_model"
    plain_logits = True
    joining = Joining.CROSSED

    def __init__(self, config: ConfigReader) -> None:
        tower: Any = self.add_tower(config)
        self.show(crops=tower.tiles)
        self.add_text(config)
        self.words.is_inside = True
        outputs = self.text_width(config)
        self.multi_modal_projector = Linear(tower.width, outputs, bias=True)

    def declare_unseen(self) -> None:
        """Both come first."""
        super().declare_unseen()
        self.named: list[object] = []
        run, options = self.run, self.run.options
        (cross_attention_states,) = self.outputs()
        self.begin_projector(cross_attention_states)
        cross_attention_states = self.multi_modal_projector(cross_attention_states)
        run.finish(cross_attention_states.record)
        width = cross_attention_states.shape[-1]
        self.words.seen = cross_attention_states.view(options.batch_size, -1, width)
        self.words.tiles = options.images_per_sample * self.picture.crops
        self.named.clear()
