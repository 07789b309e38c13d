"""What a diffusion transformer takes noise away from: the latents of pictures or clips."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserSpec:
    """A diffusion transformer, as those who ask for sizes see it; its class says the rest."""

    grid: LatentGrid
    num_layers: int
    """Of all kinds."""
