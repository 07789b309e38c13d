"""What an image model that is written as a class sees, for those who ask for sizes."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSpec:
    """Pictures as the batch brings them, and what else others ask of a model of them; its class says the rest."""

    channels: int
    """0: it reads texts alone."""
    image: tuple[int, int]
    """Height and width where the setup says nothing else [pixels]."""
    fixed: bool = False
    """The class takes no others."""
    casts: bool = False
    """The class casts them itself, so that they come in fp32."""
    patch: tuple[int, int] = (1, 1)
    """Height and width of what a token is made of, where others ask for it [pixels]."""
    crops: int = 1
    """Each comes in so many of this size."""
    num_layers: int = 0
    """Of all its lists."""
    stacks: tuple[str, ...] = ()
    """Parts that can be frozen whole."""
    meant: str = ""
    """The step that is meant where the task's class leaves it open, or has no loss of its own."""
