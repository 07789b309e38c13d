"""Language models behind whose tower little stands: a perceptron, a matrix, or nothing.

(transformers 5.23, modeling_*.py of models/gemma3, models/paligemma and models/deepseek_vl)
"""

from collections.abc import Mapping
from math import isqrt

from memplan.classes.gemma import GemmaRMSNorm
from memplan.classes.joined.base import JoinedModel
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.grids import mean_of_windows
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation

SIGLIP_224: Mapping[str, object] = {
    "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
GEMMA_2B: Mapping[str, object] = {
    "vocab_size": 257152, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
    "num_attention_heads": 8, "num_key_value_heads": 1,
}  # fmt: skip


class ProjectedModel(JoinedModel):
    """The tower's last hidden state through one module."""

    leads = "multi_modal_projector"
    """What the class calls that."""

    def get_image_features(self) -> Handle:
        last_hidden_state, _ = self.look()
        self.begin_projector(last_hidden_state)
        image_features: Handle = self.children[self.leads](last_hidden_state)
        return image_features


class Gemma3MultiModalProjector(Module):
    """Windows of patches averaged, normed, and multiplied."""

    def __init__(self, config: ConfigReader, size: int, outputs: int) -> None:
        self.mm_input_projection_weight = Weight(size, outputs)
        self.mm_soft_emb_norm = GemmaRMSNorm(size)
        self.tokens_per_side = isqrt(config.integer("mm_tokens_per_image", default=256))

    def reshaped(self, vision_outputs: Handle) -> Handle:
        """As pictures, which are copied: so does the norm before it with the gradient that comes back."""
        batch_size, length, hidden_size = vision_outputs.shape
        side = isqrt(length)
        reshaped_vision_outputs = vision_outputs.transpose(1, 2)
        reshaped_vision_outputs = reshaped_vision_outputs.reshape(
            batch_size, hidden_size, side, side
        )
        return reshaped_vision_outputs.contiguous()

    def forward(self, reshaped_vision_outputs: Handle, dtype: DType) -> Handle:
        batch_size, hidden_size, *_ = reshaped_vision_outputs.shape
        pooled_vision_outputs = mean_of_windows(reshaped_vision_outputs, self.tokens_per_side)
        pooled_vision_outputs = as_tokens(pooled_vision_outputs)
        normed_vision_outputs = self.mm_soft_emb_norm(pooled_vision_outputs)
        weight = self.operand(self.mm_input_projection_weight)
        projected_vision_outputs = matmul(normed_vision_outputs.view(-1, hidden_size), weight).view(
            batch_size, -1, weight.shape[-1]
        )
        return projected_vision_outputs.to(dtype)


class BlockMasksModel(ProjectedModel):
    """Tokens of a picture see one another: masks of every pair are made, whatever the kernel."""

    def add_text(self, config: ConfigReader) -> None:
        super().add_text(config)
        self.words.block_masks = True


class Gemma3Model(BlockMasksModel):
    text = PartSpec(key="text_config")

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config, "siglip_vision_model")
        self.multi_modal_projector = Gemma3MultiModalProjector(
            config, tower.width, self.text_width(config)
        )
        self.add_text(config)

    def get_image_features(self) -> Handle:
        last_hidden_state, _ = self.look()
        reshaped = self.multi_modal_projector.reshaped(last_hidden_state)
        self.begin_projector(reshaped)
        return self.multi_modal_projector(reshaped, last_hidden_state.dtype)


class PaliGemmaModel(BlockMasksModel):
    text = PartSpec(key="text_config", model_type="gemma", fills=GEMMA_2B)

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config, "siglip_vision_model", SIGLIP_224)
        outputs = config.integer("projection_dim")
        self.multi_modal_projector = InOrder(linear=Linear(tower.width, outputs, bias=True))
        self.add_text(config)

    def adjusted(self, logits: Handle) -> Handle:
        """Capped as the text's own."""
        made: Handle = self.words.adjusted(logits)
        return made


class DeepseekVLModel(ProjectedModel):
    sees, leads = "vision_model", "aligner"

    def __init__(self, config: ConfigReader) -> None:
        tower, outputs = self.add_tower(config, "siglip_vision_model"), self.text_width(config)
        self.aligner = InOrder(
            linear1=Linear(tower.width, outputs, bias=True),
            activation=ActivationModule(Activation.GELU),
            linear2=Linear(outputs, outputs, bias=True),
        )
        self.add_text(config)
