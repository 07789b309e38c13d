"""LLaVA and its kin: a perceptron over a layer of CLIP or SigLIP.

(transformers 5.23, modeling_*.py of models/llava and models/llava_next)
"""

from collections.abc import Mapping

from memplan.classes.joined.base import CollectedModel
from memplan.classes.pictures.parts import InOrder
from memplan.families.towers.layers import tower_activation
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader

CLIP_336: Mapping[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""CLIP ViT-L/14 at 336 pixels, which LLaVA's classes make where a file has no vision config."""


class LlavaMultiModalProjector(InOrder):
    def __init__(self, config: ConfigReader, inputs: int, outputs: int) -> None:
        bias = config.flag("multimodal_projector_bias")
        super().__init__(
            linear_1=Linear(inputs, outputs, bias=bias),
            act=ActivationModule(tower_activation(config, "projector_hidden_act")),
            linear_2=Linear(outputs, outputs, bias=bias),
        )


class LlavaModel(CollectedModel):
    nested_ties = True
    tower_kind, fills = "clip_vision_model", CLIP_336
    """Its tower where the file has none."""

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config, self.tower_kind, self.fills)
        self.read_layers(config)
        inputs = tower.width * len(self.feature_layers)
        self.multi_modal_projector = LlavaMultiModalProjector(
            config, inputs, self.text_width(config)
        )
        self.add_text(config)

    def read_layers(self, config: ConfigReader) -> None:
        """Which hidden states are read, and whether their first token is left out."""
        named = config.raw("vision_feature_layer")
        listed = named if isinstance(named, list) else [named if isinstance(named, int) else -1]
        numbers = [each for each in listed if isinstance(each, int)]
        (layers,) = self.eye.layer_lists
        self.feature_layers = layers.capture(*numbers, is_read=False)
        self.leaves_first_out = config.text("vision_feature_select_strategy") == "default"

    def get_image_features(self) -> Handle:
        _, hidden_states = self.look()
        self.begin_projector(hidden_states[self.feature_layers[0]])
        hs_pool = [self.chosen(hidden_states[number]) for number in self.feature_layers]
        selected_image_feature = hs_pool.pop() if len(hs_pool) == 1 else concatenate(*hs_pool)
        del hidden_states, hs_pool
        image_features: Handle = self.multi_modal_projector(selected_image_feature)
        return image_features

    def chosen(self, state: Handle) -> Handle:
        """Without the first token, where the strategy says so."""
        return state.narrow(state.shape[1] - 1, 1) if self.leaves_first_out else state
