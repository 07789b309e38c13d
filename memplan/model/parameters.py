"""What weights and segments are to a model, as rules ask of them."""

from enum import Enum, StrEnum


class WeightRole(Enum):
    """What a weight is to its module; rules ask this, never its name."""

    MATRIX = "matrix"
    """Of a linear layer."""
    QUERY_KEY = "query_key"
    """The same, of queries or of keys."""
    ATTENTION_OUTPUT = "attention_output"
    """The same, of what attention found."""
    OUTPUT = "output"
    """The model's output matrix, where it is not the token table."""
    ROUTER = "router"
    """The matrix that scores experts."""
    TOKEN_TABLE = "token_table"
    TABLE = "table"
    """Of positions, types or whatever else is looked up."""
    NORM = "norm"
    OTHER = "other"
    """Biases, factors, stacked experts."""

    __hash__ = object.__hash__


class LayerBlock(Enum):
    """The block of a layer that a weight stands in."""

    NETWORK = "network"
    """A feed-forward network, or none that is known."""
    ATTENTION = "attention"
    """Of a sequence with itself."""
    CROSS_ATTENTION = "cross_attention"
    MIXER = "mixer"
    """What mixes the tokens and is no attention, or none that is written down."""
    EXPERTS = "experts"
    """A mixture's routed experts."""
    SHARED_EXPERT = "shared_expert"


class ModelPart(StrEnum):
    """What a stretch of a model is to it."""

    EMBEDDING = "embedding"
    LAYERS = "layers"
    """Layers of a stack, each a module of its own."""
    NORM = "norm"
    """What stands behind a stack's layers."""
    HEAD = "head"
    """What the task adds, with its loss."""
    OTHER = "other"


def owner_of(name: str) -> str:
    """The part of a model that people freeze as a whole and that a segment is of; empty: none.

    >>> owner_of("vision_model.layers"), owner_of("layers")
    ('vision_tower', '')
    """
    first = name.partition(".")[0]
    return next((part for begins, part in _OWNERS if first.startswith(begins)), "")


def beside_of(name: str) -> str:
    """The tower or projector beside a language model that a segment is of; empty where it is none.

    >>> beside_of("vision_tower.layers"), beside_of("vision_model.layers")
    ('vision_tower', '')
    """
    first = name.partition(".")[0]
    return first if first.endswith(("_tower", "_projector")) or first in _BESIDE else ""


_OWNERS = (
    ("vision", "vision_tower"), ("video", "vision_tower"), ("visual", "vision_tower"),
    ("audio", "audio_tower"), ("text_model", "text_tower"), ("encoder", "encoder"),
    ("decoder", "decoder"), ("projector", "projector"), ("qformer", "projector"),
)  # fmt: skip
"""How segments' names begin, and the field of ``FrozenParts`` that they belong to."""
_BESIDE = frozenset({"projector", "qformer", "vqgan", "talker", "token2wav", "vocoder"})
"""Parts that stand beside a language model and are not broken down further."""
