"""How many latents a sample has, and how many tokens these are."""

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.graph.core.options import TapeOptions
from memplan.model.denoisers import LatentGrid


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
