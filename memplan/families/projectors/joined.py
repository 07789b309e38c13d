"""Towers whose neighbouring patches are joined before the projector."""

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.llava import SIGLIP_384
from memplan.families.projectors.towers import (
    VISION,
    declare_features,
    declare_normed,
    declare_tower,
    feature_layer,
    perceptron_bodies,
    width_of,
    with_pictures,
)
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.images import minicpm_vision
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair, ratio
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.projecting import (
    CropBody,
    FramesMeanBody,
    HalvedBody,
    JoinedPatchesBody,
)
from memplan.model.towers.parts import LinearBody, NormBody
from memplan.model.towers.patches import Positions


def aya_vision(table: ParameterTable, whole: Whole) -> None:
    """SigLIP, a norm over joined patches, a gated perceptron whose halves multiply."""
    vision = whole.part(VISION, "siglip_vision_model", {**SIGLIP_384, "num_attention_heads": 14})
    declare_features(table, vision)
    outputs = whole.text.hidden_size
    inner = whole.reader.integer("alignment_intermediate_size", default=outputs)
    _halved_perceptron(table, whole, width_of(vision), inner, norm=True)


def cohere2_vision(table: ParameterTable, whole: Whole) -> None:
    """Aya Vision's without the norm."""
    fills = {
        "hidden_size": 1152, "intermediate_size": 3072, "image_size": 512,
        "num_hidden_layers": 27, "num_attention_heads": 12,
    }  # fmt: skip
    vision = whole.part(VISION, "siglip_vision_model", fills)
    declare_tower(table, vision)
    inner = whole.reader.integer("alignment_intermediate_size")
    _halved_perceptron(table, whole, width_of(vision), inner, norm=False)


def _halved_perceptron(
    table: ParameterTable, whole: Whole, width: int, inner: int, *, norm: bool
) -> None:
    side, outputs = whole.reader.integer("downsample_factor"), whole.text.hidden_size
    joined = width * side**2
    normed = (NormBody(module="projector.layernorm", size=joined),) if norm else ()
    parts: tuple[TowerBody, ...] = (
        JoinedPatchesBody(size=width, side=side, copies=3),
        *normed,
        LinearBody(module="projector.linear_1", inputs=joined, outputs=inner),
        HalvedBody(activation=Activation.SILU),
        LinearBody(module="projector.linear_2", inputs=inner // 2, outputs=outputs),
    )
    with table.block("projector", body=ChainBody(parts=parts)):
        if norm:
            table.norm("projector.layernorm", joined)
        table.linear("projector.linear_1", joined, inner)
        table.linear("projector.linear_2", inner // 2, whole.text.hidden_size)


def idefics3(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and one linear layer over joined patches."""
    own = ParameterTable()
    vision = whole.part(VISION)
    declare_tower(own, vision)
    table.add(*with_pictures(own.blocks(), picked=True, positions=Positions.EACH))
    _shuffled(table, whole, width_of(vision), "scale_factor", "connector.proj")


def modernvbert(table: ParameterTable, whole: Whole) -> None:
    """The same over ModernBERT."""
    own = ParameterTable()
    vision = whole.part(VISION, "siglip_vision_model")
    declare_normed(own, vision)
    table.add(*with_pictures(own.blocks(), picked=True))
    _shuffled(table, whole, width_of(vision), "pixel_shuffle_factor", "connector")


def _shuffled(table: ParameterTable, whole: Whole, width: int, key: str, module: str) -> None:
    """Joined patches through one linear layer without a bias."""
    side, outputs = whole.reader.integer(key), whole.text.hidden_size
    joined = width * side**2
    body = ChainBody(
        parts=(
            JoinedPatchesBody(size=width, side=side, copies=2),
            LinearBody(module=module, inputs=joined, outputs=outputs, bias=False),
        )
    )
    with table.block("projector", body=body):
        table.linear(module, joined, outputs, bias=False)


def internvl(table: ParameterTable, whole: Whole) -> None:
    """InternViT, a norm over joined patches and a perceptron."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    side, width = _shuffled_side(whole.reader), width_of(vision)
    joined, outputs = width * side * side, whole.text.hidden_size
    active = tower_activation(whole.reader, "projector_hidden_act")
    parts: tuple[TowerBody, ...] = (
        CropBody(size=width),
        JoinedPatchesBody(size=width, side=side, copies=2),
        NormBody(module="projector.layer_norm", size=joined),
        *perceptron_bodies("projector", joined, outputs, outputs, active),
    )
    known = feature_layer(whole.reader) == -1
    with table.block("projector", body=ChainBody(parts=parts) if known else None):
        table.norm("projector.layer_norm", joined)
        perceptron(table, "projector", joined, outputs, outputs)


def _shuffled_side(reader: ConfigReader) -> int:
    """Patches along a side of those that are joined: InternVL gives the ratio by which they shrink.

    >>> _shuffled_side(ConfigReader({"downsample_ratio": 0.5}, source="a file"))
    2
    """
    found = ratio(reader, "downsample_ratio", default=0.5)
    side = int(1 / found) if found else 0
    if not side:
        error = reader.fail("downsample_ratio", f"must be above 0 and at most 1, got {found}")
        raise error
    return side


def lfm2_vl(table: ParameterTable, whole: Whole) -> None:
    """SigLIP 2, whose class here has no pooling head, a norm and a perceptron."""
    reader, vision = whole.reader, whole.part(VISION, "siglip2_vision_model")
    declare_normed(table, vision)
    side = reader.integer("downsample_factor")
    joined = width_of(vision) * side**2
    inner, bias = reader.integer("projector_hidden_size"), reader.flag("projector_bias")
    outputs, normed = whole.text.hidden_size, reader.flag("projector_use_layernorm")
    active = tower_activation(reader, "projector_hidden_act")
    norm = (NormBody(module="projector.layer_norm", size=joined),) if normed else ()
    parts: tuple[TowerBody, ...] = (
        JoinedPatchesBody(size=width_of(vision), side=side, copies=1 if normed else 2),
        *norm,
        *perceptron_bodies("projector", joined, inner, outputs, active, bias=bias),
    )
    with table.block("projector", body=ChainBody(parts=parts)):
        if normed:
            table.norm("projector.layer_norm", joined)
        perceptron(table, "projector", joined, inner, outputs, bias=bias)


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
