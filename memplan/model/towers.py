"""What the modules of a tower compute, as data: the operations beside a block's declared weights.

A ``ParameterBlock`` says which weights stand somewhere in a model; its ``body``, one of the dataclasses
here, says what is made of them, so that ``memplan.graph.towers`` can write it down. A block without a
body is counted only. Names of modules are those that the block declares.

The blocks of a tower follow one another: what one gives, the next reads. A body that begins with
something of the batch (pictures, token ids) reads nothing; one that joins towers names them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.layers import NormPlacement
from memplan.model.norms import NormKind, NormSpec

if TYPE_CHECKING:
    from memplan.model.attention import AttentionSpec
    from memplan.model.networks import Activation

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
RMS_NORM = NormSpec(kind=NormKind.RMS)


class Positions(Enum):
    """Where the positions come from that are added to the patches."""

    NONE = "none"
    PARAMETER = "parameter"
    """One weight, added as it is (ViT)."""
    TABLE = "table"
    """Rows of a table, looked up by a buffer of numbers (CLIP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePatches:
    """Pictures become tokens: a convolution whose stride is its kernel, other tokens, positions."""

    size: int
    """Width of a token."""
    channels: int
    image: tuple[int, int]
    """Height and width of a picture where the setup says nothing else [pixels]."""
    patch: tuple[int, int]
    projection: str
    """The convolution's module."""
    bias: bool = True
    tokens: tuple[str, ...] = ()
    """Weights that stand before the patches, as ``module.name``."""
    registers: str = ""
    """The weight that is put in behind the first token, without a position."""
    num_registers: int = 0
    positions: Positions = Positions.NONE
    position_module: str = ""
    """The table's module, or the weight as ``module.name``."""
    casts_pictures: bool = True
    """The class itself casts pictures to the convolution's dtype."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokens:
    """A text tower's ids become tokens: two tables, added (CLIP)."""

    size: int
    num_positions: int
    tokens: str
    """The module of the ids' table."""
    positions: str
    """That of the positions'."""
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """What the modules of a tower's layer are called."""

    attention: str = "self_attn"
    output: str = "out_proj"
    first_norm: str = "layer_norm1"
    second_norm: str = "layer_norm2"
    network: str = "mlp"
    up: str = "fc1"
    down: str = "fc2"
    gate: str = ""
    """The third matrix of a gated network; without one it has none."""
    first_scale: str = ""
    """A weight that multiplies what attention adds, as ``module.name``."""
    second_scale: str = ""
    fused: str = ""
    """Queries, keys and values as one matrix."""
    separate_bias: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerLayer:
    """A layer of a tower: attention and a feed-forward network, each with a norm and a sum."""

    size: int
    inner_size: int
    attention: AttentionSpec
    activation: Activation
    norm: NormSpec = LAYER_NORM
    placement: NormPlacement = NormPlacement.PRE
    bias: bool = True
    """Of the feed-forward network."""
    dropout: float = 0.0
    """Probability on what attention and network return."""
    activation_dropout: float = 0.0
    drop_path: bool = False
    """Whole samples' sums are dropped: what is added is divided and multiplied by one number each."""
    names: LayerNames = LayerNames()


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerNorm:
    """A norm by itself."""

    module: str
    size: int
    norm: NormSpec = LAYER_NORM


class TowerPooling(Enum):
    """What becomes of all tokens of a picture or a text."""

    FIRST = "first"
    """The first one's vector."""
    LAST = "last"
    """A text's last one's (SigLIP)."""
    FOUND = "found"
    """A text's end-of-sequence token's, looked for in the ids (CLIP)."""
    MEAN = "mean"
    """The mean of all."""
    PATCHES_MEAN = "patches_mean"
    """The mean of all but the first (CLIP's classifier)."""
    FIRST_AND_MEAN = "first_and_mean"
    """Both, side by side (DINOv2's classifier)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerPooler:
    """One vector of each picture or text."""

    pooling: TowerPooling
    size: int
    norm: str = ""
    """The module of a norm on it, before all else."""
    linear: str = ""
    """The module of a linear layer on it."""
    outputs: int = 0
    """Width behind that layer."""
    bias: bool = True
    activation: Activation | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPooler:
    """A trained query attends over all tokens, and a network follows (SigLIP)."""

    size: int
    inner_size: int
    num_heads: int
    activation: Activation
    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierBody:
    """Classes of each picture or clip, and their loss."""

    modules: tuple[tuple[str, int, int], ...]
    """Linear layers on the same vector, each with its inputs and its classes; their logits are averaged."""
    pooling: TowerPooling | None = None
    """None: the vector is there already."""
    bias: bool = True


class Contrast(Enum):
    """How pictures are compared with texts."""

    SOFTMAX = "softmax"
    """Cross-entropies of rows and columns (CLIP)."""
    SIGMOID = "sigmoid"
    """A log-sigmoid of each pair (SigLIP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContrastBody:
    """Pictures compared with texts: projections, norms, products, the loss."""

    kind: Contrast
    image: str
    """The tower of pictures, by the name that its blocks begin with."""
    text: str
    image_size: int
    text_size: int
    width: int
    image_projection: str = ""
    text_projection: str = ""
    scale: str = "model.logit_scale"
    shift: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spare:
    """What the class owns and this task does not use."""


TowerBody = (
    Spare
    | ImagePatches
    | TextTokens
    | TowerLayer
    | TowerNorm
    | TowerPooler
    | AttentionPooler
    | ClassifierBody
    | ContrastBody
)
