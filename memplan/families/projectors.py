"""How each type joins its towers to its text model: perceptrons, mergers, queries.

A function declares the towers of one or more types of ``multimodal_types`` and what stands between
them and the text model (``modeling_*.py`` of each type, transformers 5.23).
"""

from collections.abc import Mapping
from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.nesting import Part, same_class, unknown_part
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.clip import clip_vision, siglip2_vision, siglip_vision
from memplan.families.towers.davit import davit, stage_widths
from memplan.families.towers.images import (
    blip_vision,
    gemma4_vision,
    internvl_vision,
    janus_vision,
    kimi_vision,
    kosmos_vision,
    llama4_vision,
    minicpm_vision,
    mllama_vision,
    muse_vision,
    ovis2_vision,
    pixtral_vision,
    step_vision,
    unplaced_vision,
)
from memplan.families.towers.layers import in_place_attention, tower_activation
from memplan.families.towers.parts import attention
from memplan.families.towers.patch_vits import PATCH_VITS, declare_patch_vit
from memplan.families.towers.qformer import qformer
from memplan.families.towers.sam import sam_vision
from memplan.families.towers.sizes import pair, ratio
from memplan.families.towers.sound import (
    averaged_encoder,
    cast_encoder,
    gemma4_sound,
    glm_encoder,
    granite_encoder,
    omni_encoder,
)
from memplan.families.towers.talker import diffusion, talker, vocoder
from memplan.families.towers.vqgan import code_book, vqgan
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart, ParameterBlock, ParameterTable
from memplan.model.towers import (
    RMS_NORM,
    ActivationBody,
    AttentionPoolerBody,
    ChainBody,
    CropBody,
    HalvedBody,
    JoinedPatchesBody,
    LinearBody,
    NormBody,
    PackedCropsBody,
    PatchesBody,
    PooledProjectionBody,
    PoolerBody,
    SpareBody,
    TowerBody,
)

VISION, TEXT, AUDIO = "vision_config", "text_config", "audio_config"

TOWERS = {
    "clip_vision_model": clip_vision,
    "siglip_vision_model": siglip_vision,
    "siglip2_vision_model": siglip2_vision,
    "pixtral": pixtral_vision,
    "internvl_vision": internvl_vision,
    "kimi_k25_vision": kimi_vision,
    "muse_glimmer_vision": muse_vision,
    "minicpmv4_6_vision": minicpm_vision,
    "video_llama_3_vision": unplaced_vision,
    "ovis2_vision": ovis2_vision,
    "instructblip_vision_model": blip_vision,
    "instructblipvideo_vision_model": blip_vision,
    "blip_2_vision_model": blip_vision,
    "janus_vision_model": janus_vision,
    "kosmos_2_5_vision_model": kosmos_vision,
    "llama4_vision_model": llama4_vision,
    "mllama_vision_model": mllama_vision,
    "step3p5_vision": step_vision,
    "gemma4_vision": gemma4_vision,
    "florence_vision": davit,
    "sam_vision_model": sam_vision,
    "got_ocr2_vision": sam_vision,
    "gemma4_audio": gemma4_sound,
    "qwen2_5_omni_audio_encoder": omni_encoder,
    "qwen2_audio_encoder": averaged_encoder,
    "voxtral_encoder": cast_encoder,
    "glmasr_encoder": glm_encoder,
    "granite_speech_encoder": granite_encoder,
    "granite_speech_plus_encoder": granite_encoder,
}
"""Towers by the ``model_type`` of their config; those of ``PATCH_VITS`` beside them."""

PLAIN_SIGLIP = frozenset({"idefics3_vision", "smolvlm_vision", "paddleocr_vl_vision"})
"""Towers that are SigLIP's without the pooling head."""

CLIP_336: Mapping[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""CLIP ViT-L/14 at 336 pixels, which LLaVA's classes make where a file has no vision config."""
CLIP_224: Mapping[str, object] = {**CLIP_336, "image_size": 224}
SIGLIP_384: Mapping[str, object] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
SIGLIP_224: Mapping[str, object] = {
    "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
PIXTRAL_1540: Mapping[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 1540, "patch_size": 14,
}  # fmt: skip


def declare_tower(table: ParameterTable, part: Part, name: str = "vision_tower") -> None:
    """Declare a tower of any kind that is known here.

    Raises ``ConfigError`` for another.
    """
    if part.model_type in PATCH_VITS:
        declare_patch_vit(table, name, part.reader, part.model_type)
        return
    if part.model_type in PLAIN_SIGLIP:
        siglip_vision(table, name, headless(part.reader))
        return
    declare = TOWERS.get(part.model_type)
    if declare is None:
        raise unknown_part(part, {**TOWERS, **PATCH_VITS})
    declare(table, name, part.reader)


def declare_features(
    table: ParameterTable, part: Part, *, layer: int = -1, name: str = "vision_tower"
) -> None:
    """Declare a tower of which what a layer gives is read, not what stands behind the layers.

    ``layer`` counts hidden states as transformers does: the first is the embedding, -1 the last.
    """
    own = ParameterTable()
    declare_tower(own, part, name)
    behind = False
    for block in own.blocks():
        if block.part is not ModelPart.LAYERS:
            table.add(replace(block, body=SpareBody()) if behind else block)
            continue
        behind = True
        count = block.count + layer + 1 if layer < 0 else layer
        if count <= 0 or count >= block.count:
            table.add(block)
            continue
        spare = replace(block, count=block.count - count, body=SpareBody())
        table.add(replace(block, count=count), spare)


def declare_normed(table: ParameterTable, part: Part, name: str = "vision_tower") -> None:
    """Declare a tower of which all tokens are read behind its last norm, and no pooling head."""
    own = ParameterTable()
    declare_tower(own, part, name)
    for block in own.blocks():
        pools = isinstance(block.body, PoolerBody | AttentionPoolerBody)
        table.add(replace(block, body=SpareBody()) if pools else block)


def feature_layer(reader: ConfigReader) -> int | None:
    """The hidden states that are read; None where several are joined, or it is no number."""
    layer = reader.raw("vision_feature_layer")
    if isinstance(layer, list):
        return layer[0] if len(layer) == 1 and isinstance(layer[0], int) else None
    return layer if isinstance(layer, int) else -1


def headless(reader: ConfigReader) -> ConfigReader:
    """A SigLIP config whose tower's class has no pooling head, whatever it says."""
    return same_class(reader, {**reader.config, "vision_use_head": False})


def width_of(part: Part) -> int:
    """Hidden size of a tower."""
    return part.reader.integer("hidden_size")


def feature_layers(reader: ConfigReader) -> int:
    """How many layers' outputs are joined: ``vision_feature_layer`` is a number or a list."""
    listed = reader.raw("vision_feature_layer")
    return len(listed) if isinstance(listed, list) and listed else 1


def _llava(table: ParameterTable, whole: Whole, fills: Mapping[str, object], kind: str) -> None:
    vision = whole.part(VISION, kind, fills)
    layer = feature_layer(whole.reader)
    declare_features(table, vision, layer=-1 if layer is None else layer)
    cropped = whole.reader.raw("vision_feature_select_strategy") in (None, "default")
    crops = vision.model_type == "clip_vision_model" and cropped
    first = (CropBody(size=width_of(vision)),) if crops else ()
    _llava_projector(table, whole, width_of(vision), first, known=layer is not None)


def _llava_projector(
    table: ParameterTable,
    whole: Whole,
    width: int,
    first: tuple[TowerBody, ...] = (),
    *,
    known: bool = False,
) -> None:
    reader, outputs = whole.reader, whole.text.hidden_size
    bias = reader.flag("multimodal_projector_bias")
    inputs = width * feature_layers(reader)
    active = tower_activation(reader, "projector_hidden_act")
    parts = perceptron_bodies("projector", inputs, outputs, outputs, active, bias=bias)
    with table.block("projector", body=ChainBody(parts=(*first, *parts)) if known else None):
        perceptron(table, "projector", inputs, outputs, outputs, bias=bias)


def perceptron_bodies(
    name: str,
    inputs: int,
    inner: int,
    outputs: int,
    active: Activation,
    *,
    bias: bool = True,
) -> tuple[TowerBody, ...]:
    """What ``perceptron`` declares, as it runs."""
    return (
        LinearBody(module=f"{name}.fc1", inputs=inputs, outputs=inner, bias=bias),
        ActivationBody(activation=active),
        LinearBody(module=f"{name}.fc2", inputs=inner, outputs=outputs, bias=bias),
    )


def vip_llava(table: ParameterTable, whole: Whole) -> None:
    """Several layers of CLIP, a norm over them, and a perceptron."""
    vision = whole.part(VISION, "clip_vision_model", CLIP_336)
    declare_tower(table, vision)
    inputs, outputs = width_of(vision) * feature_layers(whole.reader), whole.text.hidden_size
    with table.block("projector"):
        table.norm("projector.projector_layernorm", inputs)
        perceptron(table, "projector", inputs, outputs, outputs)


def _newline(table: ParameterTable, whole: Whole, crops: int = 0) -> None:
    """A vector that ends a row of patches; with ``crops`` of a picture, what is made with it."""
    size, newline = whole.text.hidden_size, "model.image_newline"
    body = PackedCropsBody(size=size, crops=crops, newline=newline) if crops else None
    with table.block("projector.newline", body=body):
        table.parameter("model", "image_newline", size)


def _cropped(blocks: tuple[ParameterBlock, ...], crops: int) -> tuple[ParameterBlock, ...]:
    """The same tower, for pictures that come in several crops."""
    return tuple(
        replace(block, body=replace(block.body, crops=crops))
        if isinstance(block.body, PatchesBody)
        else block
        for block in blocks
    )


NEXT_CROPS = 3
"""LLaVA-NeXT's processor: a picture twice as wide as the tower's side is the whole and two halves."""
ONEVISION_CROPS = 2
"""LLaVA-OneVision's: one of the tower's own side is the whole, twice."""


def llava(table: ParameterTable, whole: Whole) -> None:
    """CLIP by default, and a perceptron."""
    _llava(table, whole, CLIP_336, "clip_vision_model")


def llava_next(table: ParameterTable, whole: Whole) -> None:
    """LLaVA's, with a vector for line ends."""
    own = ParameterTable()
    llava(own, whole)
    table.add(*_cropped(own.blocks(), NEXT_CROPS))
    _newline(table, whole, NEXT_CROPS)


def llava_onevision(table: ParameterTable, whole: Whole) -> None:
    """SigLIP by default."""
    own = ParameterTable()
    _llava(own, whole, SIGLIP_384, "siglip_vision_model")
    table.add(*_cropped(own.blocks(), ONEVISION_CROPS))
    _newline(table, whole, ONEVISION_CROPS)


def video_llava(table: ParameterTable, whole: Whole) -> None:
    """Two towers of one config, for images and for videos."""
    vision = whole.part(VISION, "clip_vision_model", CLIP_224)
    declare_tower(table, vision, "video_tower")
    declare_tower(table, vision)
    _llava_projector(table, whole, width_of(vision))


def mistral3(table: ParameterTable, whole: Whole) -> None:
    """Pixtral, a norm, neighbouring patches joined, a perceptron."""
    vision = whole.part(VISION, "pixtral", PIXTRAL_1540)
    declare_features(table, vision)
    width = width_of(vision)
    side = whole.reader.integer("spatial_merge_size")
    merger = ChainBody(
        parts=(
            NormBody(module="projector.norm", size=width, norm=RMS_NORM),
            JoinedPatchesBody(size=width, side=side, copies=2),
            LinearBody(
                module="patch_merger.merging_layer", inputs=width * side * side, outputs=width,
                bias=False,
            ),
        )
    )  # fmt: skip
    with table.block("projector.merger", body=merger):
        table.norm("projector.norm", width, bias=False)
        joined = width * whole.reader.integer("spatial_merge_size") ** 2
        table.linear("patch_merger.merging_layer", joined, width, bias=False)
    _llava_projector(table, whole, width, known=feature_layer(whole.reader) == -1)


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


def gemma3(table: ParameterTable, whole: Whole) -> None:
    """SigLIP, a norm and one matrix."""
    vision = whole.part(VISION, "siglip_vision_model")
    declare_normed(table, vision)
    width = width_of(vision)
    body = PooledProjectionBody(
        size=width, outputs=whole.text.hidden_size,
        tokens=whole.reader.integer("mm_tokens_per_image", default=256),
        norm="projector.mm_soft_emb_norm", weight="projector.mm_input_projection_weight",
    )  # fmt: skip
    with table.block("projector", body=body):
        table.parameter("projector", "mm_input_projection_weight", width, whole.text.hidden_size)
        table.norm("projector.mm_soft_emb_norm", width, bias=False)


def paligemma(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and one linear layer."""
    vision = whole.part(VISION, "siglip_vision_model", SIGLIP_224)
    declare_normed(table, vision)
    outputs, width = whole.reader.integer("projection_dim"), width_of(vision)
    body = LinearBody(module="projector.linear", inputs=width, outputs=outputs)
    with table.block("projector", body=body):
        table.linear("projector.linear", width, outputs)


def deepseek_vl(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and a perceptron."""
    vision = whole.part(VISION, "siglip_vision_model")
    declare_tower(table, vision)
    outputs = whole.text.hidden_size
    with table.block("projector"):
        perceptron(table, "aligner", width_of(vision), outputs, outputs)


def idefics3(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and one linear layer over joined patches."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    joined = width_of(vision) * whole.reader.integer("scale_factor") ** 2
    with table.block("projector"):
        table.linear("connector.proj", joined, whole.text.hidden_size, bias=False)


def modernvbert(table: ParameterTable, whole: Whole) -> None:
    """The same over ModernBERT."""
    vision = whole.part(VISION, "siglip_vision_model")
    declare_tower(table, vision)
    joined = width_of(vision) * whole.reader.integer("pixel_shuffle_factor") ** 2
    with table.block("projector"):
        table.linear("connector", joined, whole.text.hidden_size, bias=False)


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
    declare_tower(table, vision)
    joined = width_of(vision) * reader.integer("downsample_factor") ** 2
    inner, bias = reader.integer("projector_hidden_size"), reader.flag("projector_bias")
    with table.block("projector"):
        if reader.flag("projector_use_layernorm"):
            table.norm("projector.layer_norm", joined)
        perceptron(table, "projector", joined, inner, whole.text.hidden_size, bias=bias)


def visual(table: ParameterTable, whole: Whole) -> None:
    """A tower that ends in the text model's width by itself (Qwen-VL and its kin)."""
    declare_tower(table, whole.part(VISION))


def kimi(table: ParameterTable, whole: Whole) -> None:
    """MoonViT and a perceptron over joined patches."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    height, width = pair(vision.reader, "merge_kernel_size")
    joined = width_of(vision) * height * width
    with table.block("projector"):
        table.norm("projector.pre_norm", whole.reader.integer("projection_hidden_size"))
        perceptron(table, "projector", joined, joined, whole.text.hidden_size)


def paddle(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and a perceptron over joined patches."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    width = width_of(vision)
    joined = width * vision.reader.integer("spatial_merge_size") ** 2
    with table.block("projector"):
        table.norm("projector.pre_norm", width)
        perceptron(table, "projector", joined, joined, whole.text.hidden_size)


def video_llama3(table: ParameterTable, whole: Whole) -> None:
    """SigLIP without a position table, and a perceptron."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    outputs = whole.text.hidden_size
    with table.block("projector"):
        perceptron(table, "projector.readout", width_of(vision), outputs, outputs)


def minicpm(table: ParameterTable, whole: Whole) -> None:
    """SigLIP that joins windows, and perceptrons that join four patches each."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    width = width_of(vision)
    times = whole.reader.integer("merger_times")
    with table.block("projector"):
        for number in range(times):
            outputs = whole.text.hidden_size if number == times - 1 else width
            table.norm(f"merger.{number}.pre_norm", 4 * width)
            perceptron(table, f"merger.{number}", 4 * width, 4 * width, outputs)


def muse(table: ParameterTable, whole: Whole) -> None:
    """A tower, an adapter, a linear layer, all without a bias."""
    reader = whole.reader
    declare_tower(table, whole.part(VISION))
    inner = reader.integer("projector_hidden_size")
    with table.block("projector"):
        perceptron(table, "adapter", reader.integer("out_hidden_size"), inner, inner, bias=False)
        table.linear("vision_projection", inner, whole.text.hidden_size, bias=False)


def ovis2(table: ParameterTable, whole: Whole) -> None:
    """AIMv2 that scores visual words, and the table of those words."""
    vision = whole.part(VISION, "ovis2_vision", {"num_visual_indicator_tokens": 5})
    declare_tower(table, vision)
    with table.block("visual_words.embed"):
        rows = vision.reader.integer("vocab_size")
        table.embedding("visual_embeddings_table", rows, whole.reader.integer("hidden_size"))


def aria(table: ParameterTable, whole: Whole) -> None:
    """SigLIP, then queries that attend to the patches, and a perceptron."""
    vision = whole.part(VISION, "idefics3_vision")
    declare_tower(table, vision)
    width, outputs = width_of(vision), whole.text.hidden_size
    with table.block("projector"):
        table.parameter("projector", "query", _aria_queries(whole.reader), width)
        for projection in ("q_proj", "k_proj", "v_proj"):
            table.linear(f"cross_attn.{projection}", width, width, bias=False)
        in_place_attention(table, "cross_attn.multihead_attn", width)
        table.linear("cross_attn.linear", width, width)
        for place in ("cross_attn.layer_norm", "cross_attn.layer_norm_kv", "projector.layer_norm"):
            table.norm(place, width)
        perceptron(table, "projector", width, outputs, outputs, bias=False)


def _aria_queries(reader: ConfigReader) -> int:
    """The most queries that any number of patches is given."""
    found = reader.mapping("projector_patch_to_query_dict")
    if not found:
        return 256
    counts = [each for each in found.values() if isinstance(each, int) and each > 0]
    if len(counts) < len(found):
        error = reader.fail("projector_patch_to_query_dict", "expected whole numbers above 0")
        raise error
    return max(counts)


def instructblip(table: ParameterTable, whole: Whole) -> None:
    """EVA's tower, a Q-Former that reads text too, and a linear layer."""
    _blip(table, whole, reads_text=True)


def blip2(table: ParameterTable, whole: Whole) -> None:
    """The same with a Q-Former that reads only images."""
    _blip(table, whole, reads_text=False)


def _blip(table: ParameterTable, whole: Whole, *, reads_text: bool) -> None:
    former = whole.part("qformer_config", "blip_2_qformer")
    size = width_of(former)
    vision = whole.part(VISION)
    declare_tower(table, vision)
    with table.block("qformer.queries"):
        rows = whole.reader.integer("num_query_tokens")
        table.parameter("model", "query_tokens", 1, rows, size)
    source = {**former.reader.config, "encoder_hidden_size": width_of(vision)}
    reader = same_class(former.reader, source)
    qformer(table, "qformer", reader, embeds_text=reads_text, reads_text=reads_text)
    with table.block("projector"):
        table.linear("language_projection", size, whole.text.hidden_size)


def qwen2_audio(table: ParameterTable, whole: Whole) -> None:
    """Whisper's encoder and one linear layer."""
    audio = whole.part(AUDIO, "qwen2_audio_encoder")
    declare_tower(table, audio, "audio_tower")
    inputs, outputs = audio.reader.integer("d_model"), whole.text.hidden_size
    body = LinearBody(module="projector.linear", inputs=inputs, outputs=outputs)
    with table.block("projector", body=body):
        table.linear("projector.linear", inputs, outputs)


def voxtral(table: ParameterTable, whole: Whole) -> None:
    """Whisper's encoder and a perceptron over joined frames."""
    audio = whole.part(AUDIO, "voxtral_encoder")
    declare_tower(table, audio, "audio_tower")
    joined, outputs = audio.reader.integer("intermediate_size"), whole.text.hidden_size
    active = tower_activation(whole.reader, "projector_hidden_act")
    parts = perceptron_bodies("projector", joined, outputs, outputs, active, bias=False)
    with table.block("projector", body=ChainBody(parts=parts)):
        perceptron(table, "projector", joined, outputs, outputs, bias=False)


def glm_asr(table: ParameterTable, whole: Whole) -> None:
    """Whisper's encoder with rotary positions and a perceptron over joined frames."""
    audio = whole.part(AUDIO, "glmasr_encoder")
    declare_tower(table, audio, "audio_tower")
    joined, outputs = audio.reader.integer("intermediate_size"), whole.text.hidden_size
    with table.block("projector"):
        perceptron(table, "projector", joined, 2 * outputs, outputs)


def granite_speech(table: ParameterTable, whole: Whole) -> None:
    """A Conformer, a Q-Former over its windows, and a linear layer."""
    reader, former = whole.reader, whole.part("projector_config", "blip_2_qformer")
    declare_tower(table, whole.part("encoder_config"), "audio_tower")
    size = width_of(former)
    with table.block("qformer.queries"):
        count = reader.integer("window_size") // reader.integer("downsample_rate")
        table.parameter("projector", "query", 1, count, size)
    reads_text = former.reader.flag("use_qformer_text_input")
    qformer(table, "qformer", former.reader, reads_text=reads_text)
    with table.block("projector"):
        table.linear("projector.linear", size, whole.text.hidden_size)


def deepseek_vl_hybrid(table: ParameterTable, whole: Whole) -> None:
    """SigLIP and, for larger images, SAM; half of the text's width comes from each."""
    vision = whole.part(VISION, "siglip_vision_model")
    high = whole.part("high_res_vision_config", "sam_vision_model")
    declare_tower(table, high, "high_res_vision_tower")
    channels, outputs = high.reader.integer("output_channels"), whole.text.hidden_size
    with table.block("high_res_vision_tower.joint"):
        table.parameter("model", "high_res_vision_alpha", 1)
        sam_neck(table, "high_res_vision_neck", high.reader)
        _upsamplers(table, "high_res_vision_proj", channels, 4 * channels)
    declare_tower(table, vision)
    with table.block("projector"):
        table.linear("aligner.vision_proj", width_of(vision), outputs // 2)
        table.linear("aligner.high_res_vision_proj", 4 * channels, outputs // 2)
        table.linear("aligner.proj", outputs, outputs)


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


def got_ocr2(table: ParameterTable, whole: Whole) -> None:
    """SAM's tower, two convolutions and a linear layer."""
    vision, outputs = whole.part(VISION), whole.text.hidden_size
    declare_tower(table, vision)
    with table.block("projector"):
        _upsamplers(table, "projector", vision.reader.integer("output_channels"), outputs)
        table.linear("multimodal_projector", outputs, outputs)


def janus(table: ParameterTable, whole: Whole) -> None:
    """A tower to see with, a VQGAN to draw with, and perceptrons to and from the text model."""
    vision, drawn = whole.part(VISION), whole.part("vq_config")
    declare_tower(table, vision)
    with table.block("projector"):
        width, outputs = width_of(vision), vision.reader.integer("projection_dim")
        _deep_perceptron(table, "aligner", width, outputs, vision.reader.integer("depth"))
    vqgan(table, "vqgan", drawn.reader)
    words, width = drawn.reader.integer("num_embeddings"), drawn.reader.integer("embed_dim")
    outputs = drawn.reader.integer("projection_dim")
    with table.block("vqgan.drawing"):
        table.embedding("generation_embeddings", words, width)
        depth = drawn.reader.integer("num_hidden_layers")
        _deep_perceptron(table, "generation_aligner", width, outputs, depth)
        inputs = drawn.reader.integer("image_token_embed_dim")
        table.linear("generation_head.proj_out", inputs, outputs)
        table.linear("generation_head.vision_head", outputs, words)


def _deep_perceptron(
    table: ParameterTable, name: str, inputs: int, outputs: int, depth: int
) -> None:
    table.linear(f"{name}.fc1", inputs, outputs)
    for number in range(1, depth):
        table.linear(f"{name}.hidden_layers.{number}", outputs, outputs)


def glm_image(table: ParameterTable, whole: Whole) -> None:
    """GLM's tower and a code book of image words."""
    drawn = whole.part("vq_config")
    declare_tower(table, whole.part(VISION))
    latent, width = drawn.reader.integer("latent_channels"), drawn.reader.integer("embed_dim")
    with table.block("vqgan.code_book"):
        code_book(table, drawn.reader)
        table.convolution("quant_conv", latent, width, 1, 1)
        table.convolution("post_quant_conv", width, latent, 1, 1)


def llama4(table: ParameterTable, whole: Whole) -> None:
    """Llama 4's tower and one matrix."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    with table.block("projector"):
        inputs = vision.reader.integer("vision_output_dim")
        table.linear("projector.linear_1", inputs, whole.text.hidden_size, bias=False)


def mllama(table: ParameterTable, whole: Whole) -> None:
    """Llama 3.2's tower and one linear layer."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    with table.block("projector"):
        inputs = vision.reader.integer("vision_output_dim")
        table.linear("projector", inputs, whole.text.hidden_size)


def step(table: ParameterTable, whole: Whole) -> None:
    """Step's tower, four times as wide after its convolutions, and one linear layer."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    width = vision.reader.integer("width", "hidden_size")
    with table.block("projector"):
        bias = whole.reader.flag("projector_bias")
        table.linear("projector", 4 * width, whole.text.hidden_size, bias=bias)


def kosmos(table: ParameterTable, whole: Whole) -> None:
    """Pix2Struct's tower, and queries that attend to its patches."""
    vision, size = whole.part(VISION), whole.text.hidden_size
    declare_tower(table, vision)
    with table.block("projector"):
        table.linear("projection.dense", width_of(vision), size)
        rows = whole.reader.integer("latent_query_num")
        table.parameter("projection", "latent_query", rows, size)
        attention(table, "projection.x_attn", size)


def gemma4(table: ParameterTable, whole: Whole) -> None:
    """Towers for images and for sound, either of which a size of the family may lack."""
    for key, name in ((VISION, "vision_tower"), (AUDIO, "audio_tower")):
        if not whole.has(key):
            continue
        part = whole.part(key)
        declare_tower(table, part, name)
        width = part.reader.integer("output_proj_dims", "hidden_size")
        with table.block(f"{name}_projector"):
            table.linear("embedding_projection", width, whole.text.hidden_size, bias=False)


def florence2(table: ParameterTable, whole: Whole) -> None:
    """DaViT, a matrix and a norm, rows and columns as positions."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    reader = vision.reader
    width, outputs = stage_widths(reader)[-1], reader.integer("projection_dim")
    rows = reader.integer("max_position_embeddings")
    with table.block("projector"):
        table.linear("image_projection", width, outputs, bias=False)
        table.norm("image_proj_norm", outputs)
        table.embedding("row_embeddings", rows, width // 2)
        table.embedding("column_embeddings", rows, width - width // 2)


def omni(table: ParameterTable, whole: Whole) -> None:
    """Towers for images and for sound, both as wide as the text model."""
    declare_tower(table, whole.part(VISION))
    declare_tower(table, whole.part(AUDIO), "audio_tower")


def omni_speech(table: ParameterTable, whole: Whole) -> None:
    """The talker, and what makes waves of its codes."""
    talker(table, "talker", whole.part("talker_config").reader)
    waves = Whole(
        reader=whole.part("token2wav_config").reader,
        request=replace(whole.request, model_type="qwen2_5_omni_token2wav"),
        text=whole.text,
    )
    diffusion(table, "token2wav", waves.part("dit_config").reader)
    vocoder(table, "vocoder", waves.part("bigvgan_config").reader)
