"""The tower of packed patches of one language model, Muse Glimmer's, and what leads from it to the text.

(transformers 5.23, models/muse_glimmer/modeling_muse_glimmer.py)
"""

from collections.abc import Sequence

from memplan.classes.beside_towers.gemma4 import UnscaledNorm
from memplan.classes.joined.kimi_vision import kimi_block
from memplan.classes.joined.packed import (
    PackedTower,
    equal_stretches,
    interpolated,
    window_side,
)
from memplan.classes.joined.packed_kin import COLOURS, EncoderTower, ProjectedModel
from memplan.classes.pictures.base import begin
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import (
    ActivationModule,
    Embedding,
    LayerNorm,
    Linear,
)
from memplan.graph.modules.functional import index
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


class MusePatchEmbedder(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        side, frames = config.integer("patch_size"), config.integer("patch_temporal")
        self.patch_embedding = Linear(frames * COLOURS * side**2, size)
        rows = config.integer("pos_emb_height") * config.integer("pos_emb_width")
        self.position_embedding_table = Embedding(rows, size)

    def forward(self, pixel_values: Handle) -> Handle:
        embeddings: Handle = self.patch_embedding(pixel_values.to(self.run.compute))
        pos_embeds = interpolated(self.position_embedding_table, embeddings.shape[0])
        embeddings = embeddings + pos_embeds.to(embeddings.dtype)
        return embeddings


class MuseVisionModel(EncoderTower):
    """Most layers attend in windows, in whose order the patches lie meanwhile."""

    last, listed = "ln_post", "layers"

    def read_sizes(self, config: ConfigReader) -> None:
        self.joins = config.integer("merge_size")
        height = config.integer("pos_emb_height")
        self.side = window_side(config, "pos_emb_height", height, self.joins)
        self.frames_spanned = config.integer("patch_temporal")

    def kinds(self, config: ConfigReader) -> Sequence[bool]:
        count, listed = config.layers("num_hidden_layers"), config.texts("layer_types")
        if not listed:
            return [number % 4 != 3 and number != count - 1 for number in range(count)]
        for kind in listed:
            config.choice("layer_types", kind, ("full_attention", "window_attention"))
        if len(listed) != count:
            error = config.fail("layer_types", f"has {len(listed)} entries for {count} layers")
            raise error
        return [kind != "full_attention" for kind in listed]

    def add_embeddings(self, config: ConfigReader) -> None:
        self.patch_embedder = MusePatchEmbedder(config, self.width)
        self.ln_pre = LayerNorm(self.width)

    def layer(self, config: ConfigReader) -> Module:
        return kimi_block(config, self.width, "gelu")

    def pixels_shape(self) -> tuple[int, ...]:
        return PackedTower.pixels_shape(self)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        inputs_embeds = self.patch_embedder(pixel_values)
        rows, size = inputs_embeds.shape
        pictures, windows = equal_stretches(rows, self.num_pictures), self.windows(self.side)
        hidden_states = self.ln_pre(inputs_embeds)
        window_index = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        hidden_states = index(hidden_states, window_index, (rows, size))
        cos, sin = self.rotary_emb.of_patches(rows)
        cos, sin = cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)
        for block in self.layers:
            hidden_states = block(hidden_states, windows if block.kind else pictures, (cos, sin))
        begin(self, f"{self.tower}.norm", ModelPart.NORM, hidden_states)
        reverse_indices = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        hidden_states = index(hidden_states, reverse_indices, (rows, size))
        hidden_states = self.children[self.last](hidden_states)
        shuffle_index = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        hidden_states = index(hidden_states, shuffle_index, (rows, size))
        hidden_states = hidden_states.view(-1, self.joins**2, size)
        return (hidden_states.permute(0, 2, 1).reshape(-1, size * self.joins**2),)


class MuseVisionAdapter(Module):
    def __init__(self, config: ConfigReader) -> None:
        inner = config.integer("projector_hidden_size")
        self.fc1 = Linear(config.integer("out_hidden_size"), inner)
        self.act = ActivationModule(tower_activation(config, "projector_hidden_act"))
        self.fc2 = Linear(inner, inner)

    def forward(self, x: Handle) -> Handle:
        return self.act(self.fc2(self.act(self.fc1(x))))


class MuseModel(ProjectedModel):
    copies_ids = True

    def add_projector(self, config: ConfigReader, width: int, outputs: int) -> None:
        del width
        self.vision_adapter = MuseVisionAdapter(config)
        self.vision_projection = Linear(config.integer("projector_hidden_size"), outputs)
        self.perception_emb_norm = UnscaledNorm()

    def projected(self, image_features: Handle) -> Handle:
        vision_features = self.vision_adapter(image_features)
        vision_features = self.vision_projection(vision_features)
        vision_features = self.perception_emb_norm(vision_features)
        return vision_features

    def adjusted(self, logits: Handle) -> Handle:
        """As its text's class does."""
        made: Handle = self.words.adjusted(logits)
        return made
