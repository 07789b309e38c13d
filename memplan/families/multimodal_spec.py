"""What sets one type of language model with towers apart, as data."""

from collections.abc import Callable, Mapping
from enum import Enum

from memplan.families.nesting import Part, PartSpec, read_part
from memplan.families.request import ReadRequest
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.compared.joining import TowerJoin


class Ties(Enum):
    """Which config's ``tie_word_embeddings`` counts."""

    OUTER = "outer"
    INNER = "inner"
    """The text model is a class with a head of its own inside (InstructBLIP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """What a type's towers are declared from."""

    reader: ConfigReader
    request: ReadRequest
    text: ModelSpec

    def part(
        self, key: str, model_type: str = "", fills: Mapping[str, object] | None = None
    ) -> Part:
        """A nested config; ``model_type`` and ``fills`` as in ``PartSpec``."""
        spec = PartSpec(key=key, model_type=model_type, fills=fills or {})
        return read_part(self.reader, spec)

    def has(self, key: str) -> bool:
        """Whether the config has the nested part at all."""
        return self.reader.mapping(key) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Multimodal:
    """What one type's class fixes."""

    declare: Callable[[ParameterTable, Whole], None]
    """Declares towers and projectors."""
    text: PartSpec
    ties: Ties = Ties.OUTER
    left_out: str = "the vision tower"
    """What is counted without its activations."""
    join: TowerJoin | None = None
    """Where the towers meet the text model, if all that they compute is known."""
    attended_loss: bool = False
    """Its loss reads attended tokens alone, picked by index."""
    block_masks: bool = False
    """Tokens of a picture see one another: the text model is given masks of every pair (Gemma 3)."""
    window_masks_key: str = ""
    """The text's key that asks for such masks in windows by saying ``vision`` (Gemma 4's large sizes)."""
    head_in_base: bool = False
    """``AutoModel`` makes the class with the head (Llama 4)."""
    plain_logits: bool = False
    """It leaves its logits as they are, though the text model's own class casts them (Llama 3.2 Vision)."""
    own_output: bool = False
    """Its output matrix and loss stand behind a text model of two stacks: no bias, fp32 logits (Florence-2)."""
