"""Which parameters are not trained."""

import re
import sys
from typing import Any

from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass

ALL_LAYERS = sys.maxsize
"""Where a range of layers ends that was written ``layers``."""
ALL_BUT = "all but "
"""What patterns of names follow that alone are trained."""
_PARTS = (
    "embeddings", "norm", "head", "layers", "encoder", "decoder",
    "vision_tower", "audio_tower", "text_tower", "projector",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenParts:
    """Frozen parts of a model; by default none.

    >>> FrozenParts.parse("embeddings,layers.0-7").layer_ranges
    ((0, 7),)
    """

    embeddings: bool = False
    """Token, position and type tables, and the norm on their sum."""
    norm: bool = False
    """The final norms."""
    head: bool = False
    """What the task adds."""
    layer_ranges: tuple[tuple[int, int], ...] = ()
    """First and last number of frozen layers, counted from 0 in each stack."""
    encoder: bool = False
    """The whole encoder of an encoder-decoder."""
    decoder: bool = False
    """The whole decoder of an encoder-decoder."""
    vision_tower: bool = False
    """What sees, beside a language model or a text tower."""
    audio_tower: bool = False
    """What hears, beside a language model."""
    text_tower: bool = False
    """What reads, beside a vision tower (CLIP)."""
    projector: bool = False
    """What joins towers to a language model."""
    but: tuple[str, ...] = ()
    """Regular expressions for the beginnings of parameters' names that alone are trained (Spectrum); none: the parts
    above say what is not."""

    @classmethod
    def parse(cls, text: str) -> "FrozenParts":
        """Read ``embeddings,layers.0-7,head``, or ``all but lm_head model[.]layers[.]3[.]``.

        Raises ``SetupError`` for a part that does not exist, or what is no regular expression.

        >>> FrozenParts.parse("all but lm_head model[.]norm").but
        ('lm_head', 'model[.]norm')
        """
        if text.startswith(ALL_BUT):
            return cls(but=_patterns(text.removeprefix(ALL_BUT).split()))
        flags: set[str] = set()
        ranges: list[tuple[int, int]] = []
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, _, numbers = part.partition(".")
            if name == "layers":
                ranges.append(_layer_range(numbers, part))
            elif name in _PARTS and not numbers:
                flags.add(name)
            else:
                msg = (
                    f"freeze: {part!r} is not a part of a model; parts are embeddings, norm, head, "
                    "encoder, decoder, vision_tower, audio_tower, text_tower, projector, layers and "
                    "layers.0-7, or 'all but' and patterns of the names of what is trained."
                    f"{did_you_mean(name, _PARTS)}"
                )
                raise SetupError(msg)
        parts: dict[str, Any] = dict.fromkeys(flags, True)
        return cls(layer_ranges=tuple(ranges), **parts)

    @property
    def any(self) -> bool:
        """Whether anything is frozen."""
        return self != _NOTHING

    def freezes_layer(self, index: int) -> bool:
        """Whether the layer of this number is frozen."""
        return any(first <= index <= last for first, last in self.layer_ranges)

    def __str__(self) -> str:
        if self.but:
            return ALL_BUT + " ".join(self.but)
        names = [name for name in _PARTS if name != "layers" and getattr(self, name)]
        names += [
            "layers" if last == ALL_LAYERS else f"layers.{first}-{last}"
            for first, last in self.layer_ranges
        ]
        return ",".join(names)


_NOTHING = FrozenParts()


def _patterns(texts: list[str]) -> tuple[str, ...]:
    for each in texts:
        try:
            re.compile(each)
        except re.error as error:
            msg = f"freeze: all but {each!r:.80}: is no regular expression: {error}"
            raise SetupError(msg) from error
    return tuple(texts)


def _layer_range(numbers: str, part: str) -> tuple[int, int]:
    if not numbers:
        return (0, ALL_LAYERS)
    first, _, last = numbers.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError as error:
        msg = f"freeze: cannot read the layer numbers in {part!r}; write layers.0-7 or layers.3"
        raise SetupError(msg) from error
    if low < 0 or high < low:
        msg = f"freeze: {part!r} is not a range of layers; write layers.0-7"
        raise SetupError(msg)
    return (low, high)
