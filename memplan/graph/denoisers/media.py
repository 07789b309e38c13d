"""What a denoiser learns to make: pictures or clips, of which size, from prompts of which length."""

from memplan.graph.denoisers.sizes import pixels_of
from memplan.model.denoisers import LatentGrid
from memplan.model.spec import ModelSpec


def latents_of(model: ModelSpec) -> LatentGrid | None:
    """The latents that a diffusion transformer is given; None of any other model."""
    return None if model.denoiser is None else model.denoiser.grid


def makes_video(model: ModelSpec) -> bool:
    """Whether what it makes has frames."""
    grid = latents_of(model)
    return grid is not None and grid.frames > 1


def sample_words(
    model: ModelSpec, image_size: int | None, image_width: int | None, num_frames: int | None
) -> tuple[str, ...]:
    """What was taken for granted of a sample, in words."""
    grid = latents_of(model)
    if grid is None:
        return ()
    height, width = pixels_of(grid, image_size, image_width)
    default = "" if image_size else " (default)"
    size = f"{height}x{width} pixels{default}"
    what = f"pictures of {size}"
    if grid.frames > 1:
        default = "" if num_frames else " (default)"
        what = f"clips of {num_frames or grid.frames} frames{default} of {size}"
    return (
        what,
        "latents and prompts' embeddings made before, with no autoencoder or text encoder on the GPU",
        "loss: the mean square of the flow's direction, as in diffusers' training scripts",
        "workspaces of convolutions not counted",
    )
