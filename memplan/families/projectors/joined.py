"""Towers whose neighbouring patches are joined before the projector."""

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import (
    VISION,
    declare_tower,
    perceptron_bodies,
    width_of,
)
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.images import minicpm_vision
from memplan.families.towers.sizes import pair
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.projecting import (
    FramesMeanBody,
    JoinedPatchesBody,
)
from memplan.model.towers.parts import NormBody


def kimi(table: ParameterTable, whole: Whole) -> None:
    """MoonViT and a perceptron over joined patches."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    height, width = pair(vision.reader, "merge_kernel_size")
    joined = width_of(vision) * height * width
    normed, outputs = whole.reader.integer("projection_hidden_size"), whole.text.hidden_size
    parts = perceptron_bodies("projector", joined, joined, outputs, Activation.GELU)
    body = ChainBody(
        parts=(
            FramesMeanBody(size=width_of(vision)),
            NormBody(module="projector.pre_norm", size=normed),
            *parts,
        )
    )
    with table.block("projector", body=body):
        table.norm("projector.pre_norm", normed)
        perceptron(table, "projector", joined, joined, outputs)


def paddle(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and a perceptron over joined patches."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    width = width_of(vision)
    joined = width * vision.reader.integer("spatial_merge_size") ** 2
    side, outputs = vision.reader.integer("spatial_merge_size"), whole.text.hidden_size
    parts = perceptron_bodies("projector", joined, joined, outputs, Activation.GELU)
    body = ChainBody(
        parts=(
            NormBody(module="projector.pre_norm", size=width),
            JoinedPatchesBody(size=width, side=side, copies=1),
            *parts,
        )
    )
    with table.block("projector", body=body):
        table.norm("projector.pre_norm", width)
        perceptron(table, "projector", joined, joined, outputs)


def minicpm(table: ParameterTable, whole: Whole) -> None:
    """SigLIP that joins windows, and perceptrons that join four patches each."""
    reader, vision = whole.reader, whole.part(VISION)
    merges = reader.text("downsample_mode", default="16x") != "4x"
    # Whatever the tower's own config says.
    place = reader.integer("insert_layer_id", minimum=-1)
    minicpm_vision(table, "vision_tower", vision.reader, merged_after=place + 1 if merges else 0)
    width = width_of(vision)
    times = reader.integer("merger_times")
    side = pair(reader, "merge_kernel_size")[0]
    parts: list[TowerBody] = []
    for number in range(times):
        module = f"merger.{number}"
        outputs = whole.text.hidden_size if number == times - 1 else width
        parts += [
            JoinedPatchesBody(size=width, side=side, copies=1),
            NormBody(module=f"{module}.pre_norm", size=4 * width),
            *perceptron_bodies(module, 4 * width, 4 * width, outputs, Activation.GELU),
        ]
    with table.block("projector", body=ChainBody(parts=tuple(parts))):
        for number in range(times):
            outputs = whole.text.hidden_size if number == times - 1 else width
            table.norm(f"merger.{number}.pre_norm", 4 * width)
            perceptron(table, f"merger.{number}", 4 * width, 4 * width, outputs)
