"""Language models that see by Segment Anything's encoder: GOT-OCR 2, and DeepSeek-VL's hybrids beside SigLIP.

(transformers 5.23, modeling_*.py of models/got_ocr2 and models/deepseek_vl_hybrid)
"""

from collections.abc import Mapping

from memplan.classes.joined.base import JoinedModel, made_tower
from memplan.classes.joined.plain import ProjectedModel
from memplan.classes.pictures.base import begin, begin_tower
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.classes.segmenting.sam import SamVisionEncoder, SamVisionNeck
from memplan.families.nesting import PartSpec
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.grids import Conv2d, interpolate
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

GOT_QWEN: Mapping[str, object] = {
    "vocab_size": 151860, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768,
    "use_sliding_window": False,
}  # fmt: skip
HIGH = "vision_high_tower"


def halving(before: int, after: int) -> Conv2d:
    """A convolution that halves a picture's sides."""
    return Conv2d(before, after, 3, stride=2, padding=1, bias=False)


class GotOcr2VisionEncoder(SamVisionEncoder):
    written_out = casts = True


class GotOcr2MultiModalProjector(InOrder):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(
            conv_upsampler1=halving(channels, 2 * channels),
            conv_upsampler2=halving(2 * channels, outputs),
            multimodal_projector=Linear(outputs, outputs, bias=True),
        )

    def forward(self, x: Handle) -> Handle:
        first, second, last = self.children.values()
        x = first(x)
        x = second(x)
        x = as_tokens(x)
        x = last(x)
        return x


class GotOcr2Model(ProjectedModel):
    text = PartSpec(key="text_config", model_type="qwen2", fills=GOT_QWEN)

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config)
        assert isinstance(tower, SamVisionEncoder)
        outputs = self.text_width(config)
        self.multi_modal_projector = GotOcr2MultiModalProjector(tower.outputs, outputs)
        self.add_text(config)

    def pictures(self) -> Handle:
        """In the format of the text's embeddings."""
        return super().pictures().to(self.run.compute)


class DeepseekVLSamVisionProj(Module):
    """Resized to what two halvings make the smaller tower's grid of."""

    def __init__(self, channels: int, side: int) -> None:
        self.side = 4 * side
        self.conv1 = halving(channels, 2 * channels)
        self.conv2 = halving(2 * channels, 4 * channels)

    def forward(self, features: Handle) -> Handle:
        features = interpolate(features, self.side, self.side)
        features = self.conv1(features)
        features = self.conv2(features)
        return features


class DeepseekVLHybridAligner(Module):
    def __init__(self, low: int, high: int, outputs: int) -> None:
        self.vision_proj = Linear(low, outputs // 2, bias=True)
        self.high_res_vision_proj = Linear(high, outputs // 2, bias=True)
        self.act = ActivationModule(Activation.GELU)
        self.proj = Linear(outputs, outputs, bias=True)

    def forward(self, vision_encodings: Handle, high_res_vision_encodings: Handle) -> Handle:
        vision_encodings = self.vision_proj(vision_encodings)
        high_res_vision_encodings = self.high_res_vision_proj(high_res_vision_encodings)
        encodings = concatenate(high_res_vision_encodings, vision_encodings)
        encodings = self.act(encodings)
        encodings = self.proj(encodings)
        return encodings


class DeepseekVLHybridModel(JoinedModel):
    """SigLIP and, for larger pictures, SAM, of which a layer in the middle is read again behind it."""

    sees = "vision_model"

    def __init__(self, config: ConfigReader) -> None:
        high = made_tower(config, HIGH, "sam_vision_model", key="high_res_vision_config")
        assert isinstance(high, SamVisionEncoder)
        self.high_res_vision_model = high
        (layers,) = high.layer_lists
        (self.place,) = layers.capture(high.first_wide + 1, is_read=True)
        self.high_res_vision_neck = SamVisionNeck(high.width, high.outputs)
        tower = made_tower(config, "vision_tower", "siglip_vision_model")
        side = round(tower.context**0.5)
        self.high_res_vision_proj = DeepseekVLSamVisionProj(high.outputs, side)
        self.high_res_vision_alpha = Weight(1)
        self.add_tower(config, "siglip_vision_model")
        outputs = self.text_width(config)
        self.aligner = DeepseekVLHybridAligner(self.eye.width, 4 * high.outputs, outputs)
        self.add_text(config)

    def get_image_features(self) -> Handle:
        low, _ = self.look()
        self.run.finish(low.record)
        high = self.get_high_res_image_features()
        self.begin_projector(high)
        return self.aligner(low, high)

    def get_high_res_image_features(self) -> Handle:
        """The end of SAM, and a layer in its middle."""
        tower = self.high_res_vision_model
        begin_tower(tower, HIGH)
        (last_hidden_state,) = tower(tower.pixels())
        (layers,) = tower.layer_lists
        hidden_states = layers.take_states()
        begin(self, "projector.joint", ModelPart.OTHER, last_hidden_state)
        last_hidden_state = self.high_res_vision_proj(last_hidden_state)
        global_hidden_state = hidden_states[self.place]
        global_hidden_state = self.high_res_vision_neck(global_hidden_state)
        global_hidden_state = self.high_res_vision_proj(global_hidden_state)
        share = self.operand(self.high_res_vision_alpha)
        output = last_hidden_state + global_hidden_state * share
        output = output.permute(0, 2, 3, 1)
        return output.view(output.shape[0], -1, output.shape[-1])
