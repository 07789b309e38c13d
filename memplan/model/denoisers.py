"""What the blocks of a diffusion transformer compute, as data, as ``memplan.model.towers`` has it for towers.

A denoiser is given noised latents of pictures or clips, a prompt's embeddings and a time, and gives what
was added. Names of modules are those of diffusers' classes. Its loss is the mean square of what it gives
less what the flow's direction is (``train_dreambooth_flux.py`` of diffusers).
"""

from __future__ import annotations

from enum import Enum

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentGrid:
    """The latents of a picture or a clip, and how they are cut into tokens."""

    channels: int
    image: tuple[int, int]
    """Height and width where the setup says nothing else [pixels]."""
    scale: int
    """Pixels of a latent, down and across: the autoencoder's."""
    patch: tuple[int, int]
    """Latents of a token, down and across."""
    frames: int = 1
    """Frames of a clip where the setup says nothing else; 1: pictures."""
    frame_scale: int = 1
    """Frames of a latent behind the first."""
    frame_patch: int = 1
    """Latents of a token in time."""
    beside: int = 0
    """Channels of what is known of the clip, which stands beside the noised ones: its first frame."""

    @property
    def features(self) -> int:
        """Numbers of a token's latents."""
        return self.channels * self.patch[0] * self.patch[1] * self.frame_patch

    def frames_in_latents(self, frames: int) -> int:
        """Latents in time that so many frames become, whole tokens of them.

        >>> clip = LatentGrid(
        ...     channels=16, image=(480, 720), scale=8, patch=(2, 2), frames=49, frame_scale=4
        ... )
        >>> clip.frames_in_latents(49)
        13
        """
        found = (frames - 1) // self.frame_scale + 1
        return -(-found // self.frame_patch) * self.frame_patch


class DenoiserBody:
    """What one block of a denoiser computes."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryBody(DenoiserBody):
    """What latents, a time and a prompt become before the first layer."""

    grid: LatentGrid


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEmbedding:
    """Times, and what else is one vector a sample, become the vector that modulates the layers."""

    module: str
    """Where its parts hang."""
    size: int
    features: int
    """Sines and cosines of a time."""
    parts: tuple[str, ...] = ("timestep_embedder",)
    """Modules of two linear layers, each for a number of the sample: a time, a guidance."""
    pooled: int = 0
    """Width of a prompt's pooled embedding, which is added; 0: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEntryBody(EntryBody):
    """Latents through a convolution, with fixed positions added; times; the prompt (SD3)."""

    size: int
    time: TimeEmbedding
    text: int
    """Width of a prompt token's embedding."""
    positions: int
    """Side of the square of fixed positions that the module owns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedEntryBody(EntryBody):
    """Latents, four to a token already, through a linear layer; rotary tables (FLUX)."""

    size: int
    time: TimeEmbedding
    text: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComplexEntryBody(EntryBody):
    """Latents, four to a token already, through a linear layer; the prompt is normed first; rotary tables
    are complex numbers (Qwen-Image)."""

    size: int
    time: TimeEmbedding
    text: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionedEntryBody(EntryBody):
    """Latents through a convolution, with fixed positions added; times as all layers' modulations; the
    prompt through a network (PixArt)."""

    size: int
    time: TimeEmbedding
    text: int
    conditions: tuple[str, ...] = ()
    """Modules that embed a picture's numbers beside its time: resolution and aspect ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipEntryBody(EntryBody):
    """Latents of a clip through a convolution in space and time; rotary tables (Wan)."""

    size: int
    time_features: int
    text: int
    head_dim: int
    rotary_positions: int
    """Rows of the rotary tables that the module owns."""
    picture: int = 0
    """Width of a picture's tokens, as CLIP gives them; 0: the model is given none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedEntryBody(EntryBody):
    """A prompt and a clip in one row from the beginning (CogVideoX)."""

    size: int
    time: TimeEmbedding
    text: int
    head_dim: int
    prompt: int
    """Tokens of a prompt that the fixed positions have room for."""
    rotary: bool
    """Positions turn the heads; else they are fixed and added."""
    dropout: float = 0.0
    patch_bias: bool = True
    """The convolution over patches has a bias (CogVideoX 1.0's)."""


class HeadNorm(Enum):
    """What queries and keys are normed by, head by head."""

    NONE = "none"
    WRITTEN_OUT = "written_out"
    """An RMS norm in Python (SD3's)."""
    KERNEL = "kernel"
    """torch's own RMS norm (FLUX)."""
    LAYER = "layer"
    """A layer norm (CogVideoX)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointLayerBody(DenoiserBody):
    """Picture and prompt, each with norms and networks of its own, attend to both."""

    size: int
    inner_size: int
    num_heads: int
    head_norm: HeadNorm
    prompt_first: bool
    """The prompt's tokens stand before the picture's (FLUX), or behind them (SD3)."""
    rotary: bool = False
    dual: bool = False
    """The picture's tokens attend to themselves once more."""
    last: bool = False
    """Nothing of the prompt goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubleLayerBody(DenoiserBody):
    """Picture and prompt, each with all of its own, attend to both; heads are turned as complex numbers
    before they are joined (Qwen-Image)."""

    size: int
    inner_size: int
    num_heads: int
    last: bool = False
    """Nothing reads what it makes of the prompt, though it makes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLayerBody(DenoiserBody):
    """A picture attends to itself, then to the prompt; a table and the time modulate it (PixArt)."""

    size: int
    inner_size: int
    num_heads: int
    bias: bool
    """Of queries, keys and values."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleLayerBody(DenoiserBody):
    """One row of both: attention and network side by side, joined by one matrix (FLUX)."""

    size: int
    inner_size: int
    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossLayerBody(DenoiserBody):
    """A clip attends to itself, then to the prompt; norms and sums in fp32 (Wan)."""

    size: int
    inner_size: int
    num_heads: int
    normed: bool
    """A norm stands before the attention to the prompt."""
    sees: bool = False
    """It attends to a picture's tokens too, which stand before the prompt's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayerBody(DenoiserBody):
    """Clip and prompt share all but how they are modulated (CogVideoX)."""

    size: int
    inner_size: int
    num_heads: int
    bias: bool
    """Of queries, keys and values."""
    rotary: bool
    affine: bool
    """Norms of the tokens own weights."""
    dropout: float = 0.0


class Modulation(Enum):
    """How the last norm is modulated."""

    LINEAR = "linear"
    """By a linear layer on the time's vector."""
    TABLE = "table"
    """By a table that the time's vector is added to, in fp32 (Wan)."""
    PLAIN_TABLE = "plain_table"
    """The same in whatever format both are in (PixArt)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoisedBody(DenoiserBody):
    """The last norm, the output projection, tokens as latents again, and the loss."""

    size: int
    condition: int
    """Width of the time's vector."""
    outputs: int
    """Numbers of a token."""
    grid: LatentGrid
    modulation: Modulation = Modulation.LINEAR
    first_norm: str = ""
    """The module of a norm before it."""
    affine: bool = False
    """The modulated norm owns weights."""
    cropped: bool = False
    """What comes in is one row of prompt and picture, of which the picture's part is read."""
    halved: bool = False
    """The second half of what the class gives, a variance, is not learned from (PixArt)."""
