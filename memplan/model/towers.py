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
from memplan.model.denoisers import DenoiserBody
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
class PatchesBody:
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
    frames: int = 1
    """Pictures that one patch spans, the same one where there is no video (Qwen-VL)."""
    crops: int = 1
    """Crops that a picture comes in, each as large as ``image``."""
    masked: bool = False
    """All pictures lie in one row, told apart by a mask of every pair, and normed at once (Pixtral)."""
    rotary_dim: int = 0
    """Size of a head that the layers turn; 0: they do not."""
    windowed: bool = False
    """Patches are put in the order of windows (Qwen2.5-VL)."""
    resampled_rows: bool = False
    """Positions are mixed from four rows of the table for each patch (Qwen3-VL)."""
    casts_pictures: bool = True
    """The class itself casts pictures to the convolution's dtype."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensBody:
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
    cross_attention: str = "cross_attn"
    cross_norm: str = "cross_attn_layer_norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBody:
    """A layer of a tower: attention and a feed-forward network, each with a norm and a sum."""

    size: int
    inner_size: int
    attention: AttentionSpec
    activation: Activation
    norm: NormSpec = LAYER_NORM
    norms_last: bool = False
    """Norms stand behind the sums, not before the parts (wav2vec 2.0)."""
    bias: bool = True
    """Of the feed-forward network."""
    cross_attention: AttentionSpec | None = None
    """A decoder's, to what another tower gives."""
    memory: str = ""
    """That tower, by the name that its blocks begin with."""
    head_norm: int = 0
    """Numbers under a norm on queries and one on keys; 0: none."""
    head_norm_rms: bool = False
    """That is an RMS norm, whatever the layer's own are."""
    rotary: bool = False
    """Heads are turned by tables that the tower's first block made, in fp32, and cast back."""
    window: int = 0
    """Patches of a window that sees itself alone; 0: a picture does."""
    one_row: bool = False
    """All pictures lie in one row, told apart by the mask that the first block made (Pixtral)."""
    packed: bool = False
    """All pictures lie in one row, and their stretches' results are joined (Qwen-VL)."""
    copies_heads: bool = False
    """Queries are scaled at once, and all three copied to lie head by head (Whisper)."""
    dropout: float = 0.0
    """Probability on what attention and network return."""
    activation_dropout: float = 0.0
    drop_path: bool = False
    """Whole samples' sums are dropped: what is added is divided and multiplied by one number each."""
    names: LayerNames = LayerNames()


@dataclass(frozen=True, kw_only=True, slots=True)
class NormBody:
    """A norm by itself."""

    module: str
    size: int
    norm: NormSpec = LAYER_NORM
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolvedLayerBody:
    """A depthwise convolution, a norm and two linear layers around a nonlinearity (ConvNeXt)."""

    size: int
    inner_size: int
    activation: Activation
    scale: str = ""
    """The weight that multiplies what is added, as ``module.name``; empty: none does."""
    drop_path: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DownsamplingBody:
    """A convolution whose stride is its kernel: fewer positions, more channels."""

    module: str
    size: int
    """Channels that it reads."""
    side: int


class SignalNorm(Enum):
    """What follows a convolution of a signal."""

    NONE = "none"
    GROUP = "group"
    """A group norm with a group for each channel, before the activation."""
    LAYER = "layer"
    """A layer norm over the channels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalBody:
    """A convolution along time, a norm or none, an activation."""

    module: str
    kernel: int
    stride: int
    activation: Activation
    padding: int = 0
    bias: bool = True
    norm: SignalNorm = SignalNorm.NONE
    norm_module: str = ""
    channels: int = 0
    """Of the signal that the batch brings, where this reads it; 0: it reads what the one before gives."""
    length: int = 0
    """How long that is, where the setup says nothing else [samples or frames]."""
    rate: int = 0
    """Samples a second; 0: clips are of this length whatever they hold."""
    casts: bool = False
    """The class itself casts the signal to the weight's dtype."""
    leaf: bool = False
    """The class makes the signal require a gradient."""
    recomputed: bool = False
    """Full checkpointing drops what is inside, as it does a layer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesBody:
    """What the convolutions gave becomes tokens: fixed positions are added (Whisper)."""

    size: int
    positions: str
    """The module of their table."""
    looked_up: bool = True
    """Its rows are looked up, not added as they are."""
    cast_back: bool = False
    """The sum is cast to what the convolutions gave."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvedFramesBody:
    """Neighbouring frames are averaged in pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedFramesBody:
    """A norm, a linear layer, and a vector in place of masked stretches (wav2vec 2.0)."""

    features: int
    size: int
    norm: str = ""
    linear: str = "projection"
    dropout: float = 0.0
    mask: str = ""
    """The vector, as ``module.name``, where time is masked in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionConvolutionBody:
    """A grouped convolution over the tokens, added to them (wav2vec 2.0)."""

    size: int
    kernel: int
    activation: Activation
    groups: int
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetsBody:
    """A decoder's tokens: labels moved by one, a table, positions looked up for each sequence."""

    size: int
    num_positions: int
    tokens: str
    positions: str
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputBody:
    """The output matrix over a vocabulary, and the cross-entropy of the labels."""

    size: int
    rows: int
    table: str
    """The weight that it is where the model ties the two."""
    module: str = "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptBody:
    """Logits of every frame, and connectionist temporal classification."""

    size: int
    rows: int
    module: str = "lm_head"
    dropout: float = 0.0


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
class PoolerBody:
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
class AttentionPoolerBody:
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
class SpareBody:
    """What the class owns and this task does not use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearBody:
    """A linear layer by itself."""

    module: str
    inputs: int
    outputs: int
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationBody:
    """A nonlinearity by itself."""

    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class CropBody:
    """All tokens of a picture but its first; a copy, as what reads them wants rows."""

    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedPatchesBody:
    """Neighbouring patches become one vector, copied so often on the way (pixel shuffle)."""

    size: int
    side: int
    copies: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvedBody:
    """Half of the numbers through a nonlinearity, times the other half (Aya Vision)."""

    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCropsBody:
    """Crops become rows again, each of which a trained vector ends, behind the whole picture (LLaVA-NeXT)."""

    size: int
    crops: int
    """With the whole picture."""
    newline: str
    """The vector, as ``module.name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledProjectionBody:
    """Patches are averaged in squares, normed, and multiplied by a weight (Gemma 3)."""

    size: int
    outputs: int
    tokens: int
    """Of a picture, behind the pooling."""
    norm: str
    weight: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReorderedBody:
    """Rows are put back in another order, a copy."""

    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepMergersBody:
    """What earlier layers gave, through mergers of their own, for the text model's first layers (Qwen3-VL)."""

    modules: tuple[str, ...]
    merged: int
    """Width of neighbouring patches that are joined."""
    outputs: int


class Joining(Enum):
    """How what towers give reaches a language model."""

    SCATTERED = "scattered"
    """It is written over the embeddings of the tokens that stand for pictures (``masked_scatter``)."""
    COLLECTED = "collected"
    """The same; before, the pictures' features are joined to one tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerJoin:
    """Where towers meet the language model."""

    joining: Joining


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainBody:
    """Several of these in one module, one behind the other."""

    parts: tuple[TowerBody, ...]


TowerBody = (
    ChainBody
    | SpareBody
    | PatchesBody
    | TokensBody
    | LayerBody
    | NormBody
    | PoolerBody
    | AttentionPoolerBody
    | ClassifierBody
    | ContrastBody
    | SignalBody
    | FramesBody
    | ProjectedFramesBody
    | PositionConvolutionBody
    | TargetsBody
    | OutputBody
    | TranscriptBody
    | LinearBody
    | ActivationBody
    | CropBody
    | JoinedPatchesBody
    | PooledProjectionBody
    | ReorderedBody
    | DeepMergersBody
    | HalvedBody
    | HalvedFramesBody
    | PackedCropsBody
    | ConvolvedLayerBody
    | DownsamplingBody
    | DenoiserBody
)
