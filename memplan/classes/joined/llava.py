"""LLaVA and its kin: a perceptron over a layer of CLIP, SigLIP or Pixtral.

(transformers 5.23, modeling_*.py of models/llava, models/llava_next, models/llava_next_video, models/llava_onevision,
models/vipllava, models/video_llava and models/mistral3)
"""

from collections.abc import Mapping

from memplan.classes.joined.base import CollectedModel, JoinedModel, made_tower
from memplan.classes.pictures.parts import InOrder
from memplan.families.nesting import PartSpec
from memplan.families.towers.layers import tower_activation
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear, RMSNorm
from memplan.graph.modules.functional import expanded, unfold_picture
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader

CLIP_336: Mapping[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""CLIP ViT-L/14 at 336 pixels, which LLaVA's classes make where a file has no vision config."""
SIGLIP_384: Mapping[str, object] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
PIXTRAL_1540: Mapping[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 1540, "patch_size": 14,
}  # fmt: skip
MISTRAL_SMALL: Mapping[str, object] = {
    "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip


def perceptron(config: ConfigReader, inputs: int, outputs: int) -> dict[str, Module]:
    """``LlavaMultiModalProjector``'s modules, in its order."""
    bias = config.flag("multimodal_projector_bias", default=True)
    return {
        "linear_1": Linear(inputs, outputs, bias=bias),
        "act": ActivationModule(tower_activation(config, "projector_hidden_act")),
        "linear_2": Linear(outputs, outputs, bias=bias),
    }


class FeaturesModel(JoinedModel):
    """Some of the tower's hidden states are read, and nothing behind them."""

    tower_kind, fills = "clip_vision_model", CLIP_336
    """Its tower where the file has none."""
    reads_last = False
    """The last of the states is what stands behind the tower's last norm."""

    def __init__(self, config: ConfigReader) -> None:
        self.add_towers(config)
        self.read_layers(config)
        inputs = self.eye.width * len(self.feature_layers)
        self.multi_modal_projector = self.projector(config, inputs, self.text_width(config))
        self.add_text(config)

    def add_towers(self, config: ConfigReader) -> None:
        """The tower."""
        self.add_tower(config, self.tower_kind, self.fills)

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> Module:
        """What leads from joined states to the text."""
        return InOrder(**perceptron(config, inputs, outputs))

    def read_layers(self, config: ConfigReader) -> None:
        """Which hidden states are read, and whether their first token is left out."""
        named = config.raw("vision_feature_layer")
        listed = named if isinstance(named, list) else [named if isinstance(named, int) else -1]
        numbers = [each for each in listed if isinstance(each, int)]
        (layers,) = self.eye.layer_lists
        is_last = self.reads_last and numbers == [-1]
        self.feature_layers = numbers if is_last else layers.capture(*numbers, is_read=False)
        self.leaves_first_out = self.leaves_out(config)

    def leaves_out(self, config: ConfigReader) -> bool:
        """Whether the first token is."""
        return config.text("vision_feature_select_strategy") == "default"

    def get_image_features(self) -> Handle:
        pixel_values = self.pictures()
        return self.packed(self.multi_modal_projector(self.selected(pixel_values)))

    def selected(self, pixel_values: Handle) -> Handle:
        """The hidden states that are read, side by side."""
        last_hidden_state, hidden_states = self.look(pixel_values)
        states = [hidden_states.get(each, last_hidden_state) for each in self.feature_layers]
        del hidden_states, last_hidden_state
        self.begin_projector(states[0])
        hs_pool = [self.chosen(each) for each in states]
        del states
        return hs_pool.pop() if len(hs_pool) == 1 else concatenate(*hs_pool)

    def chosen(self, state: Handle) -> Handle:
        """Without the first token, where the strategy says so."""
        return state.narrow(state.shape[1] - 1, 1) if self.leaves_first_out else state

    def packed(self, image_features: Handle) -> Handle:
        """What is made of each picture's features."""
        return image_features


class LlavaModel(CollectedModel, FeaturesModel):
    text = PartSpec(key="text_config", model_type="llama", flat=True)
    nested_ties = True


class LlavaNextModel(FeaturesModel):
    """A picture comes whole and in crops, which are laid side by side; a vector ends each row."""

    grid = 1, 2
    """Crops that its processor makes of a picture twice as wide as high, the tower's side high."""

    def add_towers(self, config: ConfigReader) -> None:
        super().add_towers(config)
        self.show(crops=1 + self.grid[0] * self.grid[1])
        self.image_newline = Weight(self.text_width(config))

    def pictures(self) -> Handle:
        """Those of each sample that do not pad it, joined."""
        given, crops = super().pictures(), self.picture.crops
        return concatenate(*given.split(*(crops,) * (given.shape[0] // crops), dim=0), dim=0)

    def packed(self, image_features: Handle) -> Handle:
        """``pack_image_features``, and what it gives of all pictures joined."""
        crops, size = self.picture.crops, image_features.shape[-1]
        pictures = image_features.split(*(crops,) * (image_features.shape[0] // crops), dim=0)
        new_image_features = [self.laid(each, size) for each in pictures]
        del pictures
        self.named += new_image_features
        return concatenate(*new_image_features, dim=0)

    def laid(self, picture: Handle, size: int) -> Handle:
        """The whole picture, and its crops as one."""
        crops, side = picture.shape[0] - 1, round(picture.shape[1] ** 0.5)
        high, wide = self.grid
        base_image_feature, image_feature = picture.select(0), picture.narrow(crops, 0)
        image_feature = image_feature.view(high, wide, side, side, size)
        image_feature = image_feature.permute(4, 0, 2, 1, 3).contiguous()
        image_feature = image_feature.view(size, high * side, wide * side)
        ends = expanded(self.operand(self.image_newline), (size, high * side, 1))
        image_feature = concatenate(image_feature, ends.to(image_feature.dtype))
        image_feature = image_feature.view(size, -1).transpose(0, 1)
        return concatenate(base_image_feature, image_feature, dim=0)


class LlavaNextVideoModel(LlavaNextModel):
    nested_ties = True


class LlavaOnevisionModel(LlavaNextModel):
    """Of a picture of the tower's own side there is one crop, which is the whole once more."""

    text = PartSpec(key="text_config", model_type="qwen2")
    nested_ties = True
    tower_kind, fills = "siglip_vision_model", SIGLIP_384
    grid = 1, 1


class VipLlavaModel(FeaturesModel):
    """Several layers of CLIP, and a norm over them."""

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> Module:
        return InOrder(projector_layernorm=LayerNorm(inputs), **perceptron(config, inputs, outputs))

    def leaves_out(self, config: ConfigReader) -> bool:
        del config
        return True


class VideoLlavaModel(FeaturesModel):
    """Two towers of one config, for pictures and for videos; of the latter none is shown."""

    sees = "image_tower"
    unseen = ("video_tower",)
    fills: Mapping[str, object] = {**CLIP_336, "image_size": 224}

    def add_towers(self, config: ConfigReader) -> None:
        self.video_tower = made_tower(config, "video_tower", self.tower_kind, self.fills)
        super().add_towers(config)


class Mistral3PatchMerger(Module):
    """Squares of neighbouring patches, joined."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.spatial_merge_size = config.integer("spatial_merge_size")
        self.merging_layer = Linear(size * self.spatial_merge_size**2, size)

    def forward(self, image_features: Handle, sides: tuple[int, int]) -> Handle:
        tokens, size = sides[0] * sides[1], image_features.shape[-1]
        permuted_tensor = []
        for each in image_features.split(*(tokens,) * (image_features.shape[0] // tokens), dim=0):
            image_grid = each.view(*sides, size).permute(2, 0, 1).unsqueeze(0)
            grid = unfold_picture(image_grid, self.spatial_merge_size)
            grid = grid.view(grid.shape[1], grid.shape[2]).transpose(0, 1)
            permuted_tensor.append(grid)
        image_features = concatenate(*permuted_tensor, dim=0)
        image_features = self.merging_layer(image_features)
        return image_features


class Mistral3MultiModalProjector(Module):
    def __init__(self, config: ConfigReader, size: int, inputs: int, outputs: int) -> None:
        self.norm = RMSNorm(size)
        self.patch_merger = Mistral3PatchMerger(config, size)
        self.children.update(perceptron(config, inputs, outputs))

    def forward(self, image_features: Handle, sides: tuple[int, int]) -> Handle:
        image_features = self.norm(image_features)
        image_features = self.patch_merger(image_features, sides)
        hidden_states = self.children["linear_1"](image_features)
        hidden_states = self.children["act"](hidden_states)
        last: Handle = self.children["linear_2"](hidden_states)
        return last


class Mistral3Model(CollectedModel, FeaturesModel):
    """Pixtral's patches, normed and joined before the perceptron."""

    text = PartSpec(key="text_config", model_type="mistral", fills=MISTRAL_SMALL)
    tower_kind, fills = "pixtral", PIXTRAL_1540

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> Module:
        return Mistral3MultiModalProjector(config, self.eye.width, inputs, outputs)

    def leaves_out(self, config: ConfigReader) -> bool:
        del config
        return False

    def get_image_features(self) -> Handle:
        selected_image_feature = self.selected(self.pictures())
        rows = selected_image_feature.view(-1, selected_image_feature.shape[-1])
        del selected_image_feature
        return self.multi_modal_projector(rows, self.eye.sides())
