"""Towers with convolutions behind them: SAM's and Step's."""

from collections.abc import Iterator
from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import VISION, declare_normed, declare_tower, width_of
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart, ParameterBlock, ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.gridded.nets import ConvolutionBody
from memplan.model.towers.pairs import SideBySideBody, TappedBody, TwoDepthsBody
from memplan.model.towers.parts import LinearBody
from memplan.model.towers.patches import PatchesBody


def deepseek_vl_hybrid(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and, for larger images, SAM; half of the text's width comes from each."""
    vision = whole.part(VISION, "siglip_vision_model")
    high = whole.part("high_res_vision_config", "sam_vision_model")
    declare_normed(table, vision)
    own = ParameterTable()
    declare_tower(own, high, HIGH)
    table.add(*_tapped(own.blocks(), high.reader))
    channels, outputs = high.reader.integer("output_channels"), whole.text.hidden_size
    across = vision.reader.integer("image_size") // vision.reader.integer("patch_size")
    joint = TwoDepthsBody(
        size=width_of(high), channels=channels, side=across, neck="high_res_vision_neck",
        projection="high_res_vision_proj", share="model.high_res_vision_alpha",
    )  # fmt: skip
    with table.block("projector.joint", body=joint):
        table.parameter("model", "high_res_vision_alpha", 1)
        sam_neck(table, "high_res_vision_neck", high.reader)
        _upsamplers(table, "high_res_vision_proj", channels, 4 * channels)
    body = SideBySideBody(
        module="aligner", first=("projector", "high_res_vision_proj", 4 * channels),
        second=("vision_tower", "vision_proj", width_of(vision)), outputs=outputs,
    )  # fmt: skip
    with table.block("projector", body=body):
        table.linear("aligner.vision_proj", width_of(vision), outputs // 2)
        table.linear("aligner.high_res_vision_proj", 4 * channels, outputs // 2)
        table.linear("aligner.proj", outputs, outputs)


HIGH = "vision_high_tower"


def _tapped(blocks: tuple[ParameterBlock, ...], reader: ConfigReader) -> Iterator[ParameterBlock]:
    """SAM for pictures of its own size, with what its first layer without windows gives put aside."""
    place = (reader.integers("global_attn_indexes") or [-1])[0]
    passed = 0
    for block in blocks:
        body = block.body
        if isinstance(body, PatchesBody):
            body = replace(body, casts_pictures=False, resized=True)
        if block.part is not ModelPart.LAYERS:
            yield replace(block, body=body)
            continue
        first = place + 1 - passed
        passed += block.count
        if not 0 < first <= block.count:
            yield block
            continue
        yield replace(block, count=first)
        yield ParameterBlock(name=f"{HIGH}.tapped", count=1, parameters=(), body=TappedBody())
        if first < block.count:
            yield replace(block, count=block.count - first)


def sam_neck(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Two convolutions to ``output_channels``, a norm behind each (``DeepseekVLSamVisionNeck``)."""
    outputs = reader.integer("output_channels")
    table.convolution(f"{name}.conv1", reader.integer("hidden_size"), outputs, 1, 1, bias=False)
    table.norm(f"{name}.layer_norm1", outputs)
    table.convolution(f"{name}.conv2", outputs, outputs, 3, 3, bias=False)
    table.norm(f"{name}.layer_norm2", outputs)


def _upsamplers(table: ParameterTable, name: str, channels: int, outputs: int) -> None:
    """Two convolutions that halve an image's sides."""
    table.convolution(f"{name}.conv1", channels, 2 * channels, 3, 3, bias=False)
    table.convolution(f"{name}.conv2", 2 * channels, outputs, 3, 3, bias=False)


def _halving(name: str, *, bias: bool = False) -> tuple[ConvolutionBody, ...]:
    """What ``_upsamplers`` declares, as it runs."""
    return tuple(
        ConvolutionBody(module=f"{name}.conv{number}", kernel=3, stride=2, padding=2, bias=bias)
        for number in (1, 2)
    )


def got_ocr2(table: ParameterTable, whole: Whole) -> None:
    """SAM's tower, two convolutions and a linear layer."""
    vision, outputs = whole.part(VISION), whole.text.hidden_size
    declare_tower(table, vision)
    body = ChainBody(
        parts=(
            *_halving("projector"),
            LinearBody(module="multimodal_projector", inputs=outputs, outputs=outputs),
        )
    )
    with table.block("projector", body=body):
        _upsamplers(table, "projector", vision.reader.integer("output_channels"), outputs)
        table.linear("multimodal_projector", outputs, outputs)


def step(table: ParameterTable, whole: Whole) -> None:
    """Step's tower, four times as wide after its convolutions, and one linear layer."""
    vision, outputs = whole.part(VISION), whole.text.hidden_size
    declare_tower(table, vision)
    width, bias = vision.reader.integer("width", "hidden_size"), whole.reader.flag("projector_bias")
    body = LinearBody(module="projector", inputs=4 * width, outputs=outputs, bias=bias)
    with table.block("projector", body=body):
        table.linear("projector", 4 * width, outputs, bias=bias)
