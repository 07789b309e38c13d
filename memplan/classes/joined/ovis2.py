"""Ovis 2: a tower that scores visual words, and a table of these that the shares are multiplied with.

(transformers 5.23, models/ovis2/modeling_ovis2.py)
"""

from math import isqrt

from memplan.classes.compared.clip import SiglipAttention, SiglipVisionModel, VisionEmbeddings
from memplan.classes.joined.base import JoinedModel
from memplan.classes.llama import LlamaMLP
from memplan.classes.pictures.base import begin
from memplan.classes.pictures.parts import as_tokens
from memplan.families.nesting import PartSpec
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear, RMSNorm
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import detached, largest, padded, scatter, softmax, zeros
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


class Ovis2VisionEmbeddings(VisionEmbeddings):
    """Patches are normed before their positions are added."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config, token=False, bias=True)
        self.rms_norm = RMSNorm(self.size)

    def forward(self, pixel_values: Handle) -> Handle:
        patch_embeds = self.patch_embedding(pixel_values.to(self.run.compute))
        embeddings = as_tokens(patch_embeds)
        embeddings = self.rms_norm(embeddings)
        return self.placed(embeddings)


class Ovis2VisionAttention(SiglipAttention):
    def __init__(self, config: ConfigReader, size: int) -> None:
        self.output_bias = config.flag("qkv_bias")
        super().__init__(config, size)

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        return (config.flag("qkv_bias"),) * 3


class Ovis2VisionEncoderLayer(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        self.attention = Ovis2VisionAttention(config, size)
        self.ffn = LlamaMLP(config)
        self.rms_norm1, self.rms_norm2 = RMSNorm(size), RMSNorm(size)

    def forward(self, hidden_states: Handle) -> Handle:
        norm_hidden_states = self.rms_norm1(hidden_states)
        attn_output, _ = self.attention(norm_hidden_states, None)
        hidden_states = hidden_states + attn_output
        norm_hidden_states = self.rms_norm2(hidden_states)
        mlp_output = self.ffn(norm_hidden_states)
        hidden_states = hidden_states + mlp_output
        return hidden_states


class Ovis2VisionModel(SiglipVisionModel):
    """What stands behind its layers gives each visual word's share of every patch, or of squares of them."""

    def __init__(self, config: ConfigReader) -> None:
        self.width = config.integer("hidden_size")
        self.embeddings = Ovis2VisionEmbeddings(config)
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "vision_model.layers", kinds, lambda _: Ovis2VisionEncoderLayer(config, self.width)
        )
        self.rms_norm = RMSNorm(self.width)
        for name in ("embeddings", "layers", "rms_norm"):
            within = "transformer.encoder" if name == "layers" else "transformer"
            self.children[f"{within}.{name}"] = self.children.pop(name)
        self.words, self.spare = (
            config.integer("vocab_size"), config.integer("num_visual_indicator_tokens"),
        )  # fmt: skip
        self.hidden_stride = config.integer("hidden_stride")
        scored = self.words - self.spare
        self.head_linear = Linear(self.width * self.hidden_stride**2, scored)
        self.head_norm = LayerNorm(scored)
        self.tokenize_function = config.choice(
            "tokenize_function", config.text("tokenize_function", default="softmax"),
            ("softmax", "st_argmax", "gumbel_argmax"),
        )  # fmt: skip
        side, channels = config.integer("image_size"), config.integer("num_channels")
        self.picture = self.described(side, channels=channels, fixed=True)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embeddings(pixel_values)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states)
        begin(self, f"{self.tower}.words", ModelPart.OTHER, hidden_states)
        last_hidden_state = self.rms_norm(hidden_states)
        del hidden_states
        if self.hidden_stride > 1:
            last_hidden_state = self.joined_squares(last_hidden_state)
        logits = self.head_linear(last_hidden_state)
        logits = self.head_norm(logits)
        return last_hidden_state, self.shares(logits)

    def joined_squares(self, x: Handle) -> Handle:
        """Padded to whole squares, and these side by side."""
        images, length, width = x.shape
        side, stride = isqrt(length), self.hidden_stride
        wide = -(-side // stride) * stride
        x = padded(x, (images, length - side**2 + wide**2, width))
        x = x.reshape(images, wide // stride, stride, wide // stride, stride, width)
        x = x.permute(0, 1, 3, 2, 4, 5)
        return x.reshape(images, -1, stride**2 * width)

    def shares(self, logits: Handle) -> Handle:
        """Soft, or one word alone in the forward pass."""
        if self.tokenize_function == "softmax":
            return softmax(logits)
        if self.tokenize_function == "gumbel_argmax":
            kinds = OperationKind
            gumbels = made_by(self.run, kinds.UNIFORM_IN_PLACE, logits.shape, logits.dtype)
            gumbels = gumbels.apart(kinds.LOG).apart(kinds.NEG)
            logits = (logits + gumbels) / 1.0
        y_soft = softmax(logits)
        _, index = largest(y_soft)
        y_hard = scatter(zeros(logits), index)
        return y_hard - detached(y_soft) + y_soft


class Ovis2Model(JoinedModel):
    text = PartSpec(key="text_config", model_type="qwen2")

    def __init__(self, config: ConfigReader) -> None:
        tower = self.add_tower(config, "ovis2_vision", {"num_visual_indicator_tokens": 5})
        assert isinstance(tower, Ovis2VisionModel)
        self.add_text(config)
        width = config.integer("hidden_size")
        self.visual_embeddings_table = Embedding(tower.words, width)

    def output_rows(self, config: ConfigReader) -> int:
        return config.integer("vocab_size")

    def get_image_features(self) -> Handle:
        """Zeros for what is never scored; the lookup of the few words that stand around a picture is left out."""
        tower = self.eye
        assert isinstance(tower, Ovis2VisionModel)
        image_features = self.outputs()[-1]
        self.begin_projector(image_features)
        batch_size, img_seq_len, _ = image_features.shape
        padding_tensor = made_by(
            self.run, OperationKind.ZEROS, (batch_size, img_seq_len, tower.spare),
            image_features.dtype,
        )  # fmt: skip
        image_features = concatenate(image_features, padding_tensor)
        del padding_tensor
        table = self.visual_embeddings_table
        image_features = image_features.view(-1, image_features.shape[-1])
        image_features = matmul(image_features, table.operand(table.weight))
        return image_features.view(batch_size, img_seq_len, -1)
