"""Llama 4: patches through a linear layer, turned by complex numbers, and a perceptron behind a pixel shuffle.

(transformers 5.23, models/llama4/modeling_llama4.py)
"""

from typing import Any, ClassVar

from memplan.classes.joined.plain import ProjectedModel
from memplan.classes.joined.queried import BaseWithHead
from memplan.classes.joined.shuffled import pixel_shuffle, squared
from memplan.classes.mixed.llama4 import apply_rotary_emb
from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask, begin
from memplan.classes.pictures.parts import InOrder
from memplan.classes.pictures.vit import Heads, two_linear
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec
from memplan.families.towers.sizes import pair, ratio
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import expanded, unfold_picture
from memplan.graph.modules.handles import ComplexHandle, Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart
from memplan.model.spec import ModelSpec


class Llama4VisionAttention(Heads):
    dropout_key = "attention_dropout"

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        del config
        return True, True, True

    def forward(self, hidden_states: Handle, freqs_ci: Handle) -> Attended:
        batch, length, _ = hidden_states.shape
        query_states, key_states, value_states = (
            self.children[name](hidden_states).view(batch, length, -1, self.head_dim)
            for name in self.names
        )
        query_states, key_states = apply_rotary_emb(query_states, key_states, freqs_ci, freqs_ci)
        query_states = query_states.transpose(1, 2)
        key_states = key_states.transpose(1, 2)
        value_states = value_states.transpose(1, 2)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states)
        attn_output = attn_output.view(batch, length, -1)
        attn_output = self.children[self.output](attn_output)
        return attn_output, attn_weights


class Llama4VisionEncoderLayer(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        self.self_attn = Llama4VisionAttention(config, size)
        self.mlp = two_linear(size, config.integer("intermediate_size"), Activation.GELU)
        self.input_layernorm, self.post_attention_layernorm = LayerNorm(size), LayerNorm(size)

    def forward(self, hidden_state: Handle, freqs_ci: Handle) -> Handle:
        residual = hidden_state
        hidden_state = self.input_layernorm(hidden_state)
        hidden_state, _ = self.self_attn(hidden_state, freqs_ci)
        hidden_state = residual + hidden_state
        residual = hidden_state
        hidden_state = self.post_attention_layernorm(hidden_state)
        hidden_state = self.mlp(hidden_state)
        hidden_state = residual + hidden_state
        return hidden_state


class Llama4UnfoldConvolution(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        self.sides = pair(config, "patch_size")
        features = config.integer("num_channels") * self.sides[0] * self.sides[1]
        self.linear = Linear(features, size)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = unfold_picture(hidden_states, self.sides[0])
        hidden_states = hidden_states.permute(0, 2, 1)
        hidden_states = self.linear(hidden_states)
        return hidden_states


class Llama4VisionPixelShuffleMLP(Module):
    def __init__(self, config: ConfigReader) -> None:
        inner, inputs = config.integer("intermediate_size"), config.integer("projector_input_dim")
        outputs = config.integer("projector_output_dim")
        self.side = max(1, round(1 / (ratio(config, "pixel_shuffle_ratio", default=0.5) or 1)))
        self.mlp = InOrder(
            fc1=Linear(inner, inputs), activation_fn=ActivationModule(Activation.GELU),
            dropout=Dropout(config.number("projector_dropout", default=0.0)),
            fc2=Linear(outputs, outputs), again=ActivationModule(Activation.GELU),
        )  # fmt: skip

    def forward(self, encoded_patches: Handle) -> Handle:
        encoded_patches = pixel_shuffle(squared(encoded_patches), self.side).contiguous()
        batch, *_, width = encoded_patches.shape
        encoded_patches = encoded_patches.view(batch, -1, width)
        return self.mlp(encoded_patches)


class Llama4VisionModel(PictureModel):
    prefix = tower = "vision_model"
    recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}

    def __init__(self, config: ConfigReader) -> None:
        self.width = size = config.integer("hidden_size")
        side = pair(config, "image_size")[0]
        self.count = (side // pair(config, "patch_size")[0]) ** 2 + 1
        self.head_dim = size // config.integer("num_attention_heads")
        self.class_embedding = Weight(size)
        self.positional_embedding_vlm = Weight(self.count, size)
        self.patch_embedding = Llama4UnfoldConvolution(config, size)
        self.layernorm_pre, self.layernorm_post = LayerNorm(size), LayerNorm(size)
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "vision_model.layers", kinds, lambda _: Llama4VisionEncoderLayer(config, size)
        )
        self.children["model.layers"] = self.children.pop("layers")
        self.vision_adapter = Llama4VisionPixelShuffleMLP(config)
        self.outputs = config.integer("vision_output_dim")
        channels = config.integer("num_channels")
        self.picture = self.described(side, channels=channels, fixed=True)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        run, size = self.run, self.width
        hidden_state = self.patch_embedding(pixel_values)
        class_embedding = expanded(
            self.operand(self.class_embedding), (hidden_state.shape[0], 1, size)
        )
        hidden_state = concatenate(hidden_state, class_embedding, dim=1)
        hidden_state = hidden_state + self.operand(self.positional_embedding_vlm).to(
            hidden_state.dtype
        )
        hidden_state = self.layernorm_pre(hidden_state)
        table = run.buffer(self.count * self.head_dim, DType.FP32)
        freqs_ci = ComplexHandle(run, table, (1, self.count, self.head_dim))
        for encoder_layer in self.layers:
            hidden_state = encoder_layer(hidden_state, freqs_ci)
        begin(self, f"{self.tower}.adapter", ModelPart.OTHER, hidden_state)
        hidden_state = self.layernorm_post(hidden_state)
        hidden_state = hidden_state.narrow(self.count - 1, 1)
        hidden_state = self.vision_adapter(hidden_state)
        return (hidden_state,)


class Llama4Model(ProjectedModel):
    """Its class without a task has a language model's head."""

    text = PartSpec(key="text_config")
    sees = "vision_model"
    returns_features = False

    @classmethod
    def named_task(cls, config: ConfigReader, model: ModelSpec) -> type[Any] | None:
        return BaseWithHead if model.task is TaskKind.BASE else super().named_task(config, model)

    def __init__(self, config: ConfigReader) -> None:
        tower, outputs = self.add_tower(config), self.text_width(config)
        assert isinstance(tower, Llama4VisionModel)
        self.multi_modal_projector = InOrder(linear_1=Linear(tower.outputs, outputs))
        self.add_text(config)

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:
        """As the text's own config says."""
        del config
        return tied
