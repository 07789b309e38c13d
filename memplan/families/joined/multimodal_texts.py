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
    three_axes: bool = False
    """Positions in time, height and width have a table each, before one is put together from them."""

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


_QWEN2 = TextKin(family="qwen2", fixed={"head_dim": None}, three_axes=True)
_GLM4 = {"head_dim": None, "attention_bias": True}

TEXTS: dict[str, TextKin] = {
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen3_vl_text": TextKin(family="qwen3", three_axes=True),
    "qwen3_vl_moe_text": TextKin(family="qwen3_moe", three_axes=True),
    "glm4v_text": TextKin(family="glm4", fixed=_GLM4, three_axes=True),
    "glm4v_moe_text": TextKin(family="glm4_moe", fixed={"use_qk_norm": False}, three_axes=True),
    "glm_ocr_text": TextKin(family="glm4", fixed={"attention_bias": False}, three_axes=True),
    "glm_image_text": TextKin(family="glm4", three_axes=True),
    "paddleocr_vl_text": TextKin(
        family="llama",
        fixed={"attention_bias": None, "mlp_bias": None},
        named={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        three_axes=True,
    ),
}
"""By the ``model_type`` of the text's config (``modeling_*.py`` of the outer type)."""
