"""Models around a multimodal model: a retriever on top of it, a voice beside it."""

from dataclasses import replace

from memplan.families.joined.multimodal import declared, read_whole
from memplan.families.joined.multimodal_types import MULTIMODALS, OWN
from memplan.families.multimodal_spec import Multimodal, Whole
from memplan.families.nesting import PartSpec, read_part
from memplan.families.projectors.sounds import omni, omni_speech
from memplan.families.request import ReadRequest
from memplan.model.config import ConfigReader
from memplan.model.spec import ModelSpec, Task

OMNI_THINKER = Multimodal(declare=omni, text=OWN, left_out="the towers, the talker and its vocoder")


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type here."""
    return _READERS[request.model_type](reader, request)


RETRIEVED = {"colqwen2": "qwen2_vl"}
"""What stands inside a retriever whose ``vlm_config`` does not say."""


def _read_retriever(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """A base model whose tokens a linear layer makes short vectors of (``ColPaliForRetrieval``)."""
    inside = PartSpec(key="vlm_config", model_type=RETRIEVED[request.model_type])
    part = read_part(reader, inside)
    kind = MULTIMODALS.get(part.model_type)
    if kind is None:
        error = part.reader.fail("model_type", f"{part.model_type!r} is not supported here")
        raise error
    inner = replace(request, model_type=part.model_type, task=Task.BASE)
    base = read_whole(part.reader, inner, kind)
    is_base = request.task is Task.BASE
    width = 0 if is_base else reader.integer("embedding_dim")
    # No text is told apart, so that a picture's tokens see those before them alone.
    stacks = tuple(replace(stack, block_masks=False) for stack in base.stacks)
    return replace(
        base,
        family=request.model_type,
        task=Task.BASE if is_base else Task.OTHER,
        head=replace(base.head, tied=False, vector_size=width),
        stacks=stacks,
        recomputes=base.recomputes and is_base,
    )


def _read_omni(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """A thinker, and a talker where ``enable_audio_output`` asks for it."""
    thinker = read_part(reader, PartSpec(key="thinker_config"))
    inner = replace(request, model_type=thinker.model_type)
    model = read_whole(thinker.reader, inner, OMNI_THINKER)
    model = replace(model, family=request.model_type)
    if not reader.flag("enable_audio_output"):
        return model
    whole = Whole(reader=reader, request=request, text=model)
    speech = declared(omni_speech, whole)
    return replace(model, tables=(*model.tables, *speech))


_READERS = {
    "colqwen2": _read_retriever,
    "qwen2_5_omni": _read_omni,
}
