"""What a model of sound that is written as a class hears, for those who ask for lengths."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundSpec:
    """Clips as the batch brings them, and what else others ask of a model of them; its class says the rest."""

    channels: int
    """Of a signal, or numbers of each frame."""
    length: int
    """How long clips are where the setup says nothing else [samples or frames]."""
    rate: int = 0
    """Samples or frames a second; 0: clips are of this length whatever they hold."""
    is_framed: bool = False
    """Frames come one after another, and not the numbers of all frames in turn."""
    casts: bool = False
    """The class casts them itself, so that they come in fp32."""
    num_layers: int = 0
    """Of all its lists."""
    stacks: tuple[str, ...] = ()
    """Parts that can be frozen whole."""
