"""VideoMAE: cubes of a clip as tokens, whose positions are fixed; keys have no bias.

(transformers 5.23, models/videomae/modeling_videomae.py)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.pictures.base import FirstToken, PictureModel, PictureTask
from memplan.classes.pictures.parts import InOrder, Projected
from memplan.classes.pictures.vit import Heads
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair
from memplan.families.towers.vit import num_patches
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attend, in_heads, unwidened_attention
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import mean_of_tokens
from memplan.graph.modules.grids import Conv3d
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList, numbered
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart

VIDEOS = "ForVideoClassification"
PRETRAINING = "ForPreTraining"


class VideoMAEEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, channels = config.integer("hidden_size"), config.integer("num_channels")
        cube = config.integer("tubelet_size"), *pair(config, "patch_size")
        self.patch_embeddings = InOrder(projection=Conv3d(channels, size, cube))

    def forward(self, pixel_values: Handle) -> Handle:
        pixel_values = pixel_values.permute(0, 2, 1, 3, 4)
        embeddings = self.patch_embeddings(pixel_values)
        batch, size, *cubes = embeddings.shape
        embeddings = embeddings.view(batch, size, cubes[0] * cubes[1] * cubes[2]).transpose(1, 2)
        embeddings = embeddings + self.positions(embeddings)
        return embeddings

    def positions(self, embeddings: Handle) -> Handle:
        """``self.position_embeddings.detach().type_as(embeddings).to(device, copy=True)``, of the CPU's table."""
        shape = 1, *embeddings.shape[1:]
        cast = made_by(self.run, OperationKind.TO, shape, embeddings.dtype)
        return cast.apart(OperationKind.TO)


class VideoMAESelfAttention(Heads):
    names = "query", "key", "value"
    output = ""
    eager: Attend | None = staticmethod(unwidened_attention)

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        """Of each of the three."""
        bias = config.flag("qkv_bias", "qv_bias")
        return bias, False, bias

    def forward(self, hidden_states: Handle) -> Handle:
        keys, values, queries = (
            in_heads(self.children[name](hidden_states), self.head_dim)
            for name in ("key", "value", "query")
        )
        context_layer, _ = self.attend(queries, keys, values)
        return context_layer.reshape(*hidden_states.shape[:2], -1)


class VideoMAELayer(Module):
    attention_class: Callable[[ConfigReader, int], Module] = VideoMAESelfAttention

    def __init__(self, config: ConfigReader, size: int, inner: int) -> None:
        drop = config.number("hidden_dropout_prob", default=0.0)
        attention = self.attention_class(config, size)
        self.attention = Projected("attention", attention, size, drop)
        self.intermediate = InOrder(
            dense=Linear(size, inner, bias=True),
            intermediate_act_fn=ActivationModule(tower_activation(config, "hidden_act")),
        )
        self.intermediate.block = LayerBlock.NETWORK
        self.output = InOrder(dense=Linear(inner, size, bias=True), dropout=Dropout(drop))
        self.output.block = LayerBlock.NETWORK
        self.layernorm_before, self.layernorm_after = LayerNorm(size), LayerNorm(size)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states_norm = self.layernorm_before(hidden_states)
        attention_output = self.attention(hidden_states_norm)
        hidden_states = attention_output + hidden_states
        layer_output = self.layernorm_after(hidden_states)
        layer_output = self.intermediate(layer_output)
        layer_output = self.output(layer_output) + hidden_states
        return layer_output


class VideoMAEForVideoClassification(FirstToken):
    def add_head(self, config: ConfigReader) -> None:
        """A norm of the mean, where that is what is read."""
        if config.flag("use_mean_pooling"):
            self.fc_norm = LayerNorm(self.model.width)
        super().add_head(config)

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The normed mean of all tokens, or the first of them."""
        if "fc_norm" not in self.children:
            return super().vector(last_hidden_state, *others)
        output = mean_of_tokens(last_hidden_state)
        output = self.fc_norm(output)
        return output


class VideoMAEForPreTraining(PictureTask):
    """Cubes are hidden and drawn again by a narrow decoder: what is left of them is not written down."""

    def add_head(self, config: ConfigReader) -> None:
        """The decoder, of layers of its own sizes."""
        width, inner = (
            config.integer("decoder_hidden_size"), config.integer("decoder_intermediate_size"),
        )  # fmt: skip
        self.encoder_to_decoder = Linear(self.model.width, width)
        self.mask_token = Weight(1, 1, width)
        depth = config.layers("decoder_num_hidden_layers")
        self.decoder = InOrder()
        for number in range(depth):
            layer = VideoMAELayer(config, width, inner)
            setattr(self.decoder, f"decoder_layers.{number}", layer)
        height, across = pair(config, "patch_size")
        pixels = config.integer("tubelet_size") * height * across * config.integer("num_channels")
        self.decoder.norm = LayerNorm(width)
        self.decoder.head = Linear(width, pixels, bias=True)


class VideoMAEModel(PictureModel):
    prefix = "videomae"
    recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        VIDEOS: VideoMAEForVideoClassification, PRETRAINING: VideoMAEForPreTraining,
    }  # fmt: skip

    def __init__(self, config: ConfigReader) -> None:
        self.frames, size = config.integer("num_frames"), config.integer("hidden_size")
        self.width, inner = size, config.integer("intermediate_size")
        times = self.frames // config.integer("tubelet_size")
        self.context = max(1, num_patches(config) * times)
        self.embeddings = VideoMAEEmbeddings(config)
        kinds = [None] * config.layers("num_hidden_layers")
        layers = LayerList("layers", kinds, lambda _: VideoMAELayer(config, size, inner))
        setattr(self, "encoder.layer", layers)
        if not config.flag("use_mean_pooling"):
            self.layernorm = LayerNorm(size)
            self.layernorm.segment = "norm", ModelPart.NORM
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels, fixed=True)

    def left_out(self, ending: str) -> bool:
        """Which cubes pretraining hides is not written down."""
        return ending == PRETRAINING

    def forward(self, pixel_values: Handle) -> tuple[Handle]:
        embedding_output = self.embeddings(pixel_values)
        hidden_states = embedding_output
        for layer_module in numbered(self)[0]:
            hidden_states = layer_module(hidden_states)
        sequence_output = hidden_states
        if "layernorm" in self.children:
            sequence_output = self.layernorm(sequence_output)
        return (sequence_output,)
