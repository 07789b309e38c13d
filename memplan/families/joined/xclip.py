"""X-CLIP: CLIP over the frames of a clip, with messages between frames, and texts that see the clip."""

from dataclasses import replace

from memplan.families.classes import BARE, whole_model
from memplan.families.nesting import towers
from memplan.families.request import ReadRequest
from memplan.families.towers.clip import clip_text, clip_vision
from memplan.families.towers.layers import encoder_attention, perceptron, tower_activation
from memplan.families.towers.parts import attention, transformer_layer
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart, ParameterBlock, ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.compared.videos import (
    ClipContrastBody,
    FramesBeginBody,
    FramesEndBody,
    MessageLayerBody,
    PromptLayerBody,
    PromptsBeginBody,
    SeenPatchesBody,
)
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.pairs import TappedBody
from memplan.model.towers.parts import LinearBody
from memplan.model.towers.patches import PatchesBody

LAYER_NAMES = LayerNames(output="o_proj")


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``XCLIPModel``, whose batch has as many clips as texts."""
    text, vision = towers(reader, request.model_type)
    size, width = vision.integer("hidden_size"), reader.integer("projection_dim")

    def declare(table: ParameterTable, _ending: str) -> None:
        own = ParameterTable()
        clip_vision(own, "vision_model", vision)
        for block in own.blocks():
            table.add(_with_frames(block, vision))
            if block.part is ModelPart.LAYERS:
                with table.block("vision_model.tapped", body=TappedBody()):
                    pass
        projection = LinearBody(module="visual_projection", inputs=size, outputs=width, bias=False)
        with table.block("vision_head", body=projection):
            table.linear("visual_projection", size, width, bias=False)
        _frame_transformer(table, vision)
        _seen(table, vision, width)
        clip_text(table, "text_model", text)
        inputs = text.integer("hidden_size")
        projection = LinearBody(module="text_projection", inputs=inputs, outputs=width, bias=False)
        with table.block("text_head", body=projection):
            table.linear("text_projection", inputs, width, bias=False)
        _prompts(table, reader)

    return whole_model(
        reader, request, (BARE,), declare,
        hidden_size=text.integer("hidden_size"), vocab_size=text.integer("vocab_size"),
        context_length=text.integer("max_position_embeddings"),
    )  # fmt: skip


def _with_frames(block: ParameterBlock, vision: ConfigReader) -> ParameterBlock:
    """CLIP's block, seeing all frames of a clip, with messages in each layer."""
    frames, body = vision.integer("num_frames"), block.body
    if isinstance(body, PatchesBody):
        return replace(block, body=replace(body, crops=frames, resized=True))
    if not isinstance(body, LayerBody):
        return block
    size, own = vision.integer("hidden_size"), ParameterTable()
    with own.block("messages"):
        attention(own, "message_attn", size)
        own.norm("message_norm", size)
        own.linear("message_fc", size, size)
    names = LayerNames(attention="message_attn", output="o_proj", first_norm="message_norm")
    drops = vision.number("drop_path_rate", default=0.0) > 0
    with_messages = MessageLayerBody(
        layer=replace(body, drop_path=drops), messages=replace(body, names=names), frames=frames
    )
    parameters = (*block.parameters, *own.blocks()[0].parameters)
    return replace(block, parameters=parameters, body=with_messages)


def _frame_transformer(table: ParameterTable, vision: ConfigReader) -> None:
    """``XCLIPMultiframeIntegrationTransformer``: positions of frames and layers over them."""
    width, inner = vision.integer("mit_hidden_size"), vision.integer("mit_intermediate_size")
    frames = vision.integer("num_frames")
    begin = FramesBeginBody(size=width, frames=frames, positions="mit.position_embedding")
    with table.block("mit.embed", body=begin):
        table.parameter("mit", "position_embedding", 1, frames, width)
    heads = vision.integer("mit_num_attention_heads")
    dropout = vision.number("attention_dropout", default=0.0)
    spec = replace(
        encoder_attention(vision, width, dropout=dropout), num_heads=heads, num_kv_heads=heads,
        head_dim=width // heads,
    )  # fmt: skip
    layer = LayerBody(
        size=width, inner_size=inner, attention=spec, names=LAYER_NAMES,
        activation=tower_activation(vision, "hidden_act"),
    )  # fmt: skip
    with table.block("mit.layers", count=vision.layers("mit_num_hidden_layers"), body=layer):
        transformer_layer(table, width, inner)
    with table.block("mit.clip", body=FramesEndBody(frames=frames)):
        pass


def _seen(table: ParameterTable, vision: ConfigReader, width: int) -> None:
    size = vision.integer("hidden_size")
    body = SeenPatchesBody(
        size=size, outputs=width, frames=vision.integer("num_frames"),
        norm="prompts_visual_layernorm", weight="model.prompts_visual_projection",
    )  # fmt: skip
    with table.block("seen", body=body):
        table.norm("prompts_visual_layernorm", size)
        table.parameter("model", "prompts_visual_projection", size, width)


def _prompts(table: ParameterTable, reader: ConfigReader) -> None:
    """``XCLIPPromptGenerator``, four times as wide inside, and the loss."""
    width = reader.integer("projection_dim")
    begin = PromptsBeginBody(size=width, norm="prompts_generator.layernorm")
    with table.block("prompts.begin", body=begin):
        table.norm("prompts_generator.layernorm", width)
    layer = PromptLayerBody(
        size=width, num_heads=reader.integer("prompt_num_attention_heads"),
        activation=tower_activation(reader, "prompt_hidden_act"),
        attention_dropout=reader.number("prompt_attention_dropout", default=0.0),
        dropout=reader.number("prompt_projection_dropout", default=0.0),
    )  # fmt: skip
    with table.block("prompts.readers", count=reader.layers("prompt_layers"), body=layer):
        for each in ("q_proj", "k_proj", "v_proj"):
            table.linear(f"cross_attn.{each}", width, width, bias=False)
        table.linear("cross_attn.proj", width, width)
        table.norm("norm1", width)
        table.norm("norm3", width)
        perceptron(table, "mlp", width, 4 * width)
    body = ClipContrastBody(width=width, share="prompts_generator.alpha", scale="model.logit_scale")
    with table.block("head", body=body):
        table.parameter("prompts_generator", "alpha", width)
        table.parameter("model", "logit_scale")
