"""Transformers over the patches of an image or a video: ViT and its kin."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.layers import encoder_attention, perceptron, tower_activation
from memplan.families.towers.parts import attention, fused_attention
from memplan.families.towers.sizes import pair
from memplan.families.towers.vit import (
    VIT_TOWERS,
    num_patches,
    patch_projection,
    vit_tower,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.clips import ClipBody, FramesLayerBody, FramesPatchesBody
from memplan.model.towers.compared.pooling import ClassifierBody, PoolerBody, TowerPooling
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.parts import NormBody

IMAGES = "ForImageClassification"
TEACHER = "ForImageClassificationWithTeacher"
MASKED_IMAGES = "ForMaskedImageModeling"
VIDEOS = "ForVideoClassification"
PRETRAINING = "ForPreTraining"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _vit(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """ViT, DeiT, I-JEPA and DINOv2; a class with a head has no pooler."""
    kind = VIT_TOWERS[request.model_type]
    size = reader.integer("hidden_size")
    features = size * (2 if kind.scaled else 1)

    def declare(table: ParameterTable, ending: str) -> None:
        bare = ending == BARE
        masked = ending == MASKED_IMAGES
        vit_tower(table, "model", reader, kind, pooled=kind.pooled and bare, masked=masked)
        pooling = _POOLINGS.get(request.model_type, TowerPooling.FIRST)
        if ending == IMAGES:
            classifier(table, "classifier", features, request.labels(reader), pooling=pooling)
        if ending == TEACHER:
            _two_classifiers(table, features, request.labels(reader))
        if masked:
            pixels = reader.integer("encoder_stride") ** 2 * reader.integer("num_channels")
            with table.block("head"):
                table.convolution("decoder", size, pixels, 1, 1)

    return whole_model(
        reader, request, _VIT_CLASSES.get(request.model_type, (IMAGES, BARE)), declare,
        hidden_size=size, context_length=num_patches(reader),
    )  # fmt: skip


def _two_classifiers(table: ParameterTable, size: int, num_labels: int) -> None:
    """Of the class token and of the distillation token, averaged; the class has no loss of its own."""
    names = ("classifier", "distillation_classifier")
    if not num_labels:
        return
    modules = tuple((name, size, num_labels) for name in names)
    with table.block("head", body=ClassifierBody(modules=modules, pooling=TowerPooling.FIRST)):
        for name in names:
            table.linear(name, size, num_labels)


_POOLINGS = {
    "ijepa": TowerPooling.MEAN,
    "dinov2": TowerPooling.FIRST_AND_MEAN,
    "dinov2_with_registers": TowerPooling.FIRST_AND_MEAN,
}
"""What a type's classifier reads, where that is not the first token's vector."""

_VIT_CLASSES: dict[str, tuple[str, ...]] = {
    "vit": (IMAGES, BARE, MASKED_IMAGES),
    "deit": (IMAGES, BARE, MASKED_IMAGES, TEACHER),
}


def _videomae(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """VideoMAE: positions are fixed, keys have no bias; pretraining has a narrow decoder."""
    size = reader.integer("hidden_size")
    tubelet = reader.integer("tubelet_size")
    mean_pooling = reader.flag("use_mean_pooling", default=True)

    def declare(table: ParameterTable, ending: str) -> None:
        # Pretraining hides patches: what is left of them is not written down.
        written = ending != PRETRAINING
        clips = ClipBody(
            size=size, channels=reader.integer("num_channels"), image=pair(reader, "image_size"),
            patch=pair(reader, "patch_size"), frames=reader.integer("num_frames"), span=tubelet,
            projection="patch_embeddings",
        )  # fmt: skip
        with table.block("embed", body=clips if written else None):
            patch_projection(table, reader, size, tubelet)
        body = _videomae_body(reader, size) if written else None
        with table.block("layers", count=reader.layers("num_hidden_layers"), body=body):
            _videomae_layer(table, reader, size, reader.integer("intermediate_size"))
        pooled = ending == VIDEOS and mean_pooling
        if not mean_pooling or ending == VIDEOS:
            mean = PoolerBody(pooling=TowerPooling.MEAN, size=size, norm="layernorm")
            with table.block(
                "norm", body=mean if pooled else NormBody(module="layernorm", size=size)
            ):
                table.norm("layernorm", size)
        if ending == VIDEOS:
            labels, first = request.labels(reader), None if pooled else TowerPooling.FIRST
            classifier(table, "classifier", size, labels, pooling=first, known=True)
        if ending == PRETRAINING:
            _videomae_decoder(table, reader, size, tubelet)

    frames = reader.integer("num_frames") // tubelet
    return whole_model(
        reader, request, (VIDEOS, BARE, PRETRAINING), declare,
        hidden_size=size, context_length=max(1, num_patches(reader) * frames),
    )  # fmt: skip


def _videomae_body(reader: ConfigReader, size: int) -> LayerBody:
    """``VideoMAELayer``: ViT's, whose keys have no bias."""
    bias = reader.flag("qkv_bias", "qv_bias", default=True)
    drop = reader.number("attention_probs_dropout_prob", default=0.0)
    attention = encoder_attention(reader, size, bias=bias, dropout=drop)
    return LayerBody(
        size=size, inner_size=reader.integer("intermediate_size"),
        attention=replace(attention, key_bias=False),
        activation=tower_activation(reader, "hidden_act"),
        dropout=reader.number("hidden_dropout_prob", default=0.0),
        names=LayerNames(
            output="o_proj", first_norm="layernorm_before", second_norm="layernorm_after"
        ),
    )  # fmt: skip


def _videomae_layer(table: ParameterTable, reader: ConfigReader, size: int, inner: int) -> None:
    bias = reader.flag("qkv_bias", "qv_bias", default=True)
    attention(table, "self_attn", size, bias=bias, key_bias=False)
    table.norm("layernorm_before", size)
    table.norm("layernorm_after", size)
    perceptron(table, "mlp", size, inner)


def _videomae_decoder(table: ParameterTable, reader: ConfigReader, size: int, tubelet: int) -> None:
    """``VideoMAEDecoder``: layers of their own sizes, then the pixels of a tube of patches."""
    width = reader.integer("decoder_hidden_size")
    height, across = pair(reader, "patch_size")
    with table.block("decoder.embed"):
        table.linear("encoder_to_decoder", size, width, bias=False)
        table.parameter("model", "mask_token", 1, 1, width)
    with table.block("decoder.layers", count=reader.layers("decoder_num_hidden_layers")):
        _videomae_layer(table, reader, width, reader.integer("decoder_intermediate_size"))
    with table.block("head"):
        table.norm("norm", width)
        table.linear("head", width, reader.integer("num_channels") * tubelet * height * across)


def _timesformer(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """TimeSformer: where space and time are divided, each layer attends over frames first."""
    size = reader.integer("hidden_size")
    kind = reader.choice(
        "attention_type", reader.text("attention_type"),
        ("divided_space_time", "space_only", "joint_space_time"),
    )  # fmt: skip
    bias = reader.flag("qkv_bias", default=True)
    # What each frame says of itself alone has no loss in the class: labels are a clip's.
    written = kind != "space_only"
    drop = reader.number("hidden_dropout_prob", default=0.0)
    patches = FramesPatchesBody(
        size=size, channels=reader.integer("num_channels"), image=pair(reader, "image_size"),
        patch=pair(reader, "patch_size"), frames=reader.integer("num_frames"), dropout=drop,
    )  # fmt: skip
    body = FramesLayerBody(
        size=size, inner_size=reader.integer("intermediate_size"), frames=patches.frames,
        num_heads=reader.integer("num_attention_heads"), bias=bias,
        divided=kind == "divided_space_time", activation=tower_activation(reader, "hidden_act"),
        dropout=drop, attention_dropout=reader.number("attention_probs_dropout_prob", default=0.0),
    )  # fmt: skip

    def declare_layer(table: ParameterTable) -> None:
        fused_attention(table, "self_attn", size, bias=bias)
        table.norm("layernorm_before", size)
        table.norm("layernorm_after", size)
        perceptron(table, "mlp", size, reader.integer("intermediate_size"))
        if body.divided:
            fused_attention(table, "temporal_attn", size, bias=bias)
            table.norm("temporal_layernorm", size)
            table.linear("temporal_dense", size, size)

    def declare(table: ParameterTable, ending: str) -> None:
        with table.block("embed", body=patches if written else None):
            table.parameter("embeddings", "cls_token", 1, 1, size)
            table.parameter("embeddings", "position_embeddings", 1, num_patches(reader) + 1, size)
            if kind != "space_only":
                frames = reader.integer("num_frames")
                table.parameter("embeddings", "time_embeddings", 1, frames, size)
            patch_projection(table, reader, size)
        count = reader.layers("num_hidden_layers")
        drops = reader.number("drop_path_rate", default=0.0) > 0
        # The share that is dropped grows from none in the first layer.
        plain = 1 if drops else count
        with table.block("layers", count=plain, body=body if written else None):
            declare_layer(table)
        dropping = replace(body, drop_path=True) if written else None
        with table.block("layers", count=count - plain, body=dropping):
            declare_layer(table)
        with table.block("norm", body=NormBody(module="layernorm", size=size)):
            table.norm("layernorm", size)
        if ending == VIDEOS:
            labels = request.labels(reader)
            classifier(table, "classifier", size, labels, pooling=TowerPooling.FIRST, known=written)

    model = whole_model(
        reader, request, (VIDEOS, BARE), declare,
        hidden_size=size, context_length=num_patches(reader) * reader.integer("num_frames"),
    )  # fmt: skip
    return replace(model, eager_attention_only=True)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    **dict.fromkeys(VIT_TOWERS, _vit),
    "videomae": _videomae,
    "timesformer": _timesformer,
}
