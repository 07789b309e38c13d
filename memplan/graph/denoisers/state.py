"""What the blocks of a denoiser hand on beside the stream of pictures or clips."""

from dataclasses import field

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.model.denoisers import LatentGrid

PICTURE_TOKENS = 257
"""Of CLIP's large model: 16 x 16 patches and one for all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSize:
    """The latents of one sample."""

    frames: int
    height: int
    width: int
    grid: LatentGrid

    @property
    def numel(self) -> int:
        """Their elements."""
        return self.grid.channels * self.frames * self.height * self.width

    @property
    def tokens(self) -> int:
        """Tokens they are cut into."""
        down, across = self.grid.patch
        times = self.frames // self.grid.frame_patch
        return times * (self.height // down) * (self.width // across)


def pixels_of(grid: LatentGrid, image_size: int | None, image_width: int | None) -> tuple[int, int]:
    """Height and width of a picture, as the setup or the model says [pixels].

    Raises ``SetupError`` for a width without a height.
    """
    if image_size is not None:
        return image_size, image_width or image_size
    if image_width is not None:
        height = grid.image[0]
        msg = f"image_width: {image_width}: say the height too: image_size={height}, for one"
        raise SetupError(msg)
    return grid.image


def latent_size(options: TapeOptions, grid: LatentGrid) -> LatentSize:
    """The latents of a sample of this setup.

    Raises ``SetupError`` for a picture that is no whole number of tokens.
    """
    height, width = pixels_of(grid, options.image_size, options.image_width)
    across = "image_size" if options.image_width is None else "image_width"
    for name, side, patch in (
        ("image_size", height, grid.patch[0]),
        (across, width, grid.patch[1]),
    ):
        if side % (grid.scale * patch):
            msg = f"{name}: {side} pixels are no whole number of tokens of {grid.scale * patch} pixels each"
            raise SetupError(msg)
    return LatentSize(
        frames=grid.frames_in_latents(options.num_frames or grid.frames),
        height=height // grid.scale,
        width=width // grid.scale,
        grid=grid,
    )


@dataclass(slots=True)
class Denoising:
    """What the blocks hand on."""

    batch: int
    prompt_tokens: int
    """Of each sample."""
    size: LatentSize | None = None
    condition: Tensor | None = None
    """What modulates the layers: the time, and what was added to it."""
    modulations: Tensor | None = None
    """The same as all layers' modulations, where it is projected once (Wan)."""
    prompt: Tensor | None = None
    """The prompt's stream, where it is one of its own."""
    memory: Tensor | None = None
    """The prompt, where all layers attend to the same."""
    mask: Tensor | None = None
    """What of the prompts is padding, as something to add to scores."""
    tables: tuple[Tensor, Tensor] | None = None
    """Cosines and sines by which heads are turned, or the picture's complex numbers and the prompt's."""
    shared: list[Tensor] = field(default_factory=list)
    """What all layers read, until the model returns."""

    @property
    def tokens(self) -> int:
        """Of the pictures or clips of the batch."""
        assert self.size is not None
        return self.batch * self.size.tokens

    @property
    def latents(self) -> int:
        """Elements of the batch's latents."""
        assert self.size is not None
        return self.batch * self.size.numel

    def share(self, t: Tape, tensor: Tensor) -> Tensor:
        """Hold a tensor until the model returns."""
        t.hold(tensor)
        self.shared.append(tensor)
        return tensor

    def condition_of(self) -> Tensor:
        """What modulates the layers, which the first block has made."""
        assert self.condition is not None
        return self.condition


def batch_dtype(t: Tape) -> DType:
    """What the training scripts hold latents and embeddings in (``weight_dtype``)."""
    return t.autocast or t.compute
