"""Text models that are another family's under a name of their own."""

from collections.abc import Callable, Mapping
from dataclasses import field
from types import MappingProxyType

from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader

NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class TextKin:
    """Which family reads a text model, and where its class differs from that family's."""

    family: str
    fixed: Mapping[str, object] = field(default_factory=lambda: NOTHING)
    """What the class does whatever the config says; a None takes the key away."""
    named: Mapping[str, str] = field(default_factory=dict)
    """What the class calls a key of the family's."""
    derived: Callable[[ConfigReader], Mapping[str, object]] | None = None
    """Keys of the family's that follow from others."""
    left_out: str = ""
    """What of its activations is not in the figures."""

    def adapt(self, reader: ConfigReader) -> ConfigReader:
        """The config as the family reads it."""
        derived = NOTHING if self.derived is None else self.derived(reader)
        return reader.nested(
            {**reader.config, **self.fixed, **derived},
            reader.path,
            model_type=reader.model_type,
            defaults=reader.defaults,
            renamed={**reader.renamed, **self.named},
            absent_part=reader.absent_part,
        )


THREE_AXES = "activations of rotary tables for three axes"
"""Positions in time, height and width have a table each, before one is put together from them."""

_QWEN2 = TextKin(family="qwen2", fixed={"head_dim": None}, left_out=THREE_AXES)
_GLM4 = {"head_dim": None, "attention_bias": True}

TEXTS: dict[str, TextKin] = {
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen3_vl_text": TextKin(family="qwen3", left_out=THREE_AXES),
    "qwen3_vl_moe_text": TextKin(family="qwen3_moe", left_out=THREE_AXES),
    "glm4v_text": TextKin(family="glm4", fixed=_GLM4, left_out=THREE_AXES),
    "glm4v_moe_text": TextKin(family="glm4_moe", fixed={"use_qk_norm": False}, left_out=THREE_AXES),
    "glm_ocr_text": TextKin(family="glm4", fixed={"attention_bias": False}, left_out=THREE_AXES),
    "glm_image_text": TextKin(family="glm4", left_out=THREE_AXES),
    "paddleocr_vl_text": TextKin(
        family="llama",
        fixed={"attention_bias": None, "mlp_bias": None},
        named={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        left_out=THREE_AXES,
    ),
}
"""By the ``model_type`` of the text's config (``modeling_*.py`` of the outer type)."""
