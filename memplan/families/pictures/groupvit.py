"""GroupViT: patches are merged into groups between stages, and both projections are deep."""

from dataclasses import replace

from memplan.families.classes import BARE, whole_model
from memplan.families.nesting import towers
from memplan.families.request import ReadRequest
from memplan.families.towers.clip import clip_text, patches_across
from memplan.families.towers.layers import perceptron, tower_activation
from memplan.families.towers.parts import attention, transformer_layer
from memplan.families.towers.sizes import at_least_one, stage_ratios
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody
from memplan.model.towers.compared.contrast import Contrast, ContrastBody
from memplan.model.towers.compared.pooling import PoolerBody, TowerPooling
from memplan.model.towers.gridded.nets import BatchNormBody
from memplan.model.towers.grouping import GroupsAssignBody, GroupsBeginBody, WrittenLayerBody
from memplan.model.towers.layers import LayerBody
from memplan.model.towers.parts import LAYER_NORM, ActivationBody, LinearBody, NormBody
from memplan.model.towers.patches import PatchesBody, Positions


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """``GroupViTModel``."""
    text, vision = towers(reader, request.model_type)

    def declare(table: ParameterTable, _ending: str) -> None:
        _tower(table, vision)
        _projection(table, reader, "visual_projection", vision.integer("hidden_size"))
        own = ParameterTable()
        clip_text(own, "text_model", text)
        for block in own.blocks():
            body = block.body
            if isinstance(body, LayerBody):
                body = replace(_layer(text), causal=True, output="out_proj")
            table.add(replace(block, body=body))
        _projection(table, reader, "text_projection", text.integer("hidden_size"))
        width = reader.integer("projection_dim")
        contrast = ContrastBody(
            kind=Contrast.SOFTMAX, image="visual_projection", text="text_projection",
            image_size=width, text_size=width, width=width,
        )  # fmt: skip
        with table.block("head", body=contrast):
            table.parameter("model", "logit_scale")

    model = whole_model(
        reader, request, (BARE,), declare,
        hidden_size=text.integer("hidden_size"), vocab_size=text.integer("vocab_size"),
        context_length=text.integer("max_position_embeddings"),
    )  # fmt: skip
    return replace(model, eager_attention_only=True)


def _projection(table: ParameterTable, reader: ConfigReader, name: str, size: int) -> None:
    inner, out = reader.integer("projection_intermediate_dim"), reader.integer("projection_dim")
    body = ChainBody(
        parts=(
            LinearBody(module=f"{name}.0", inputs=size, outputs=inner),
            BatchNormBody(module=f"{name}.1", channels=inner),
            ActivationBody(activation=Activation.RELU),
            LinearBody(module=f"{name}.3", inputs=inner, outputs=out),
        )
    )
    with table.block(name, body=body):
        table.linear(f"{name}.0", size, inner)
        table.norm(f"{name}.1", inner)
        table.linear(f"{name}.3", inner, out)


def _layer(reader: ConfigReader) -> WrittenLayerBody:
    return WrittenLayerBody(
        size=reader.integer("hidden_size"), inner_size=reader.integer("intermediate_size"),
        num_heads=reader.integer("num_attention_heads"),
        activation=tower_activation(reader, "hidden_act"),
        dropout=reader.number("attention_dropout", default=0.0),
    )  # fmt: skip


def _tower(table: ParameterTable, vision: ConfigReader) -> None:
    """``GroupViTVisionTransformer``; a stage without group tokens merges nothing."""
    size, patch_size = vision.integer("hidden_size"), vision.integer("patch_size")
    depths = at_least_one(vision, "depths")
    groups = vision.integers("num_group_tokens")
    outputs = vision.integers("num_output_groups")
    if not len(depths) == len(groups) == len(outputs):
        error = vision.fail("depths", "num_group_tokens and num_output_groups must be as many")
        raise error
    channels, side = vision.integer("num_channels"), vision.integer("image_size")
    patches = PatchesBody(
        size=size, channels=channels, image=(side, side), patch=(patch_size, patch_size),
        projection="patch_embeddings", first_norm="embed_norm", first_norm_kind=LAYER_NORM,
        positions=Positions.PARAMETER, position_module="embeddings.position_embeddings",
        casts_pictures=False, dropout=vision.number("dropout", default=0.0),
    )  # fmt: skip
    with table.block("vision_model.embed", body=patches):
        table.convolution("patch_embeddings", channels, size, patch_size, patch_size)
        table.parameter("embeddings", "position_embeddings", 1, patches_across(vision) ** 2, size)
        table.norm("embed_norm", size)
    for index, (depth, count, merged) in enumerate(zip(depths, groups, outputs, strict=True)):
        name, before = f"vision_model.stages.{index}", outputs[index - 1] if index else 0
        if count:
            _begin(table, vision, name, count, before)
        with table.block(f"{name}.layers", count=depth, body=_layer(vision)):
            transformer_layer(table, size, vision.integer("intermediate_size"))
        if count:
            _assign(table, vision, name, count, merged)
    with table.block("vision_model.norm", body=NormBody(module="layernorm", size=size)):
        table.norm("layernorm", size)
    mean = PoolerBody(pooling=TowerPooling.MEAN, size=size)
    with table.block("vision_model.pooled", body=mean):
        pass


def _begin(table: ParameterTable, vision: ConfigReader, name: str, count: int, before: int) -> None:
    """Tokens of groups, and what brings those of the stage before along."""
    size = vision.integer("hidden_size")
    body = GroupsBeginBody(
        size=size, count=count, before=before, activation=tower_activation(vision, "hidden_act")
    )
    with table.block(f"{name}.begin", body=body):
        table.parameter("stage", "group_token", 1, count, size)
        if before:
            table.norm("group_projector.norm", size)
            _mixer(table, "group_projector.mlp", before, size // 2, count)


def _assign(
    table: ParameterTable, vision: ConfigReader, name: str, count: int, merged: int
) -> None:
    """``GroupViTTokenAssign``."""
    size, inner = vision.integer("hidden_size"), vision.integer("intermediate_size")
    shares = stage_ratios(vision, "assign_mlp_ratio", 2)
    tokens, channels = int(shares[0] * size), int(shares[1] * size)
    body = GroupsAssignBody(
        size=size, count=count, outputs=merged, num_heads=vision.integer("num_attention_heads"),
        tokens_size=tokens, inner_size=inner, channels_size=channels,
        activation=tower_activation(vision, "hidden_act"),
        dropout=vision.number("attention_dropout", default=0.0),
    )  # fmt: skip
    with table.block(f"{name}.assign", body=body):
        for norm in ("norm_tokens", "norm_post_tokens", "norm_x", "norm_new_x"):
            table.norm(f"downsample.{norm}", size)
        _mixer(table, "downsample.mlp_inter", count, tokens, merged)
        attention(table, "downsample.pre_assign_attn", size)
        table.norm("downsample.norm2", size)
        table.norm("downsample.norm_post", size)
        perceptron(table, "downsample.mlp", size, inner)
        attention(table, "downsample.assign_attn", size)
        perceptron(table, "downsample.mlp_channels", size, channels)


def _mixer(table: ParameterTable, name: str, size: int, inner: int, out: int) -> None:
    table.linear(f"{name}.fc1", size, inner)
    table.linear(f"{name}.fc2", inner, out)
