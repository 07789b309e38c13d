"""How long the sequences of a data set are, and how they are put into batches: pure data."""

from collections.abc import Iterable, Mapping
from enum import Enum

from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.text import shown
from memplan.units import round_up

MAX_POINTS = 16
"""Distinct lengths that are told apart; of more, each stands for those just below it too."""
MAX_LENGTH = 2**31


class Batching(Enum):
    """How sequences of unequal lengths make a batch."""

    PADDED = "padded"
    """Each batch to the longest in it."""
    PACKED = "packed"
    """Joined until a row is full: every row has ``seq_len`` tokens, whatever the lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """A distribution of sequence lengths.

    >>> lengths = Lengths.read("512:60%,1024:30%,4096:10%,multiple=64")
    >>> lengths.longest, lengths.share_up_to(1024)
    (4096, 0.9)
    >>> Lengths.read("p50=512,p95=2048,max=4096").share_up_to(2048)
    0.95
    """

    shares: tuple[tuple[int, float], ...]
    """Lengths in ascending order, each with the share of all sequences that are so long; they add up
    to 1."""
    batching: Batching = Batching.PADDED
    pad_to_multiple_of: int = 1
    """Padded batches are so many tokens or a multiple of it long."""

    def __post_init__(self) -> None:
        total = 0.0
        before = 0
        for length, share in self.shares:
            if not before < length <= MAX_LENGTH or share <= 0:
                msg = f"lengths: {length}:{share:g}: lengths must rise, and shares be above 0"
                raise SetupError(msg)
            before = length
            total += share
        if not self.shares or abs(total - 1) > 0.005:
            msg = f"lengths: the shares add up to {total:.1%}, not 100 %"
            raise SetupError(msg)
        if not 1 <= self.pad_to_multiple_of <= MAX_LENGTH:
            msg = f"lengths: multiple: must be from 1 up, got {self.pad_to_multiple_of}"
            raise SetupError(msg)

    @classmethod
    def read(cls, value: object) -> "Lengths | None":
        """Lengths out of a text or a mapping: a histogram, or percentiles up to ``max``.

        Between two percentiles every length counts as the upper one's. Raises ``SetupError``.
        """
        if value is None or isinstance(value, Lengths):
            return value
        if isinstance(value, Mapping):
            parts = [(str(key), each) for key, each in value.items()]
        elif isinstance(value, str):
            parts = [_part(each) for each in value.split(",") if each.strip()]
        else:
            msg = f"lengths: expected 512:60%,4096:40% or p50=512,max=4096, got {shown(value)}"
            raise SetupError(msg)
        histogram: dict[int, float] = {}
        percentiles: dict[float, int] = {}
        others: dict[str, object] = {}
        for key, each in parts:
            if key.isdecimal():
                length = _length(key, key)
                if length in histogram:
                    msg = f"lengths: {length}: is given twice: add its shares up"
                    raise SetupError(msg)
                histogram[length] = _share(each, key)
            elif key == "max" or (key[:1] == "p" and _number(key[1:]) is not None):
                percentiles[100.0 if key == "max" else float(key[1:])] = _length(each, key)
            else:
                others[key] = each
        batching, multiple = _batching(others)
        if bool(histogram) == bool(percentiles):
            msg = (
                "lengths: give a histogram (512:60%,4096:40%) or percentiles (p50=512,max=4096), "
                "one of them"
            )
            raise SetupError(msg)
        shares = _sorted(histogram) if histogram else _between(percentiles)
        return cls(shares=shares, batching=batching, pad_to_multiple_of=multiple)

    @classmethod
    def of(cls, lengths: Iterable[int], **settings: "Batching | int") -> "Lengths":
        """Of counted sequences, each by its length [tokens].

        >>> Lengths.of([10, 10, 30, 40]).shares
        ((10, 0.5), (30, 0.25), (40, 0.25))
        """
        counts: dict[int, int] = {}
        for length in lengths:
            counts[length] = counts.get(length, 0) + 1
        total = sum(counts.values())
        shares = tuple((each, counts[each] / total) for each in sorted(counts) if each > 0)
        return cls(shares=_thinned(shares), **settings)  # type: ignore[arg-type]

    @property
    def longest(self) -> int:
        """The longest sequence [tokens]."""
        return self.shares[-1][0]

    def share_up_to(self, length: int) -> float:
        """The share of sequences that are no longer."""
        return min(1.0, round(sum(share for each, share in self.shares if each <= length), 12))

    def padded(self, length: int) -> int:
        """The length of a batch whose longest sequence is so long [tokens]."""
        return round_up(length, self.pad_to_multiple_of)

    def __str__(self) -> str:
        text = ",".join(f"{length}:{share:.4%}" for length, share in self.shares)
        text = text.replace("0000%", "%").replace(".%", "%")
        if self.batching is not Batching.PADDED:
            text += f",{self.batching.value}"
        if self.pad_to_multiple_of > 1:
            text += f",multiple={self.pad_to_multiple_of}"
        return text


def _part(text: str) -> tuple[str, object]:
    """``512:60%``, ``p50=512``, ``packed`` or ``multiple=8``."""
    for separator in (":", "="):
        key, found, value = text.partition(separator)
        if found:
            return key.strip(), value.strip()
    return text.strip(), True


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if 0 < found <= 100 else None


def _share(value: object, key: str) -> float:
    text = str(value)
    try:
        found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= 1:
        msg = f"lengths: {key}: expected a share such as 60% or 0.6, got {shown(value)}"
        raise SetupError(msg)
    return found


def _length(value: object, key: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        msg = f"lengths: {key}: expected a number of tokens, got {shown(value)}"
        raise SetupError(msg)
    return int(text)


def _batching(others: dict[str, object]) -> tuple[Batching, int]:
    multiple, batching = 1, Batching.PADDED
    modes = {each.value: each for each in Batching}
    for key, value in others.items():
        if key in ("multiple", "pad_to_multiple_of"):
            multiple = _length(value, key)
        elif key in modes and value is True:
            if len(modes.keys() & others.keys()) > 1:
                msg = f"lengths: {' and '.join(sorted(modes.keys() & others.keys()))}: give one"
                raise SetupError(msg)
            batching = modes[key]
        elif key in ("batching", "mode") and str(value) in modes:
            batching = modes[str(value)]
        else:
            known = [*modes, "multiple", "max", "p50"]
            msg = (
                f"lengths: {shown(key)}: is no length, percentile (p95=2048, max=4096), packed, padded "
                f"or multiple=8.{did_you_mean(key, known)}"
            )
            raise SetupError(msg)
    return batching, multiple


def _sorted(histogram: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return _thinned(tuple(sorted(histogram.items())))


def _between(percentiles: Mapping[float, int]) -> tuple[tuple[int, float], ...]:
    """Shares between percentiles, each at the upper one's length."""
    if 100.0 not in percentiles:
        msg = "lengths: percentiles need a longest one too: max=4096"
        raise SetupError(msg)
    found: dict[int, float] = {}
    below, before = 0.0, 0
    for percent in sorted(percentiles):
        length = percentiles[percent]
        if length < before:
            msg = f"lengths: p{percent:g}={length}: is shorter than a lower percentile"
            raise SetupError(msg)
        found[length] = found.get(length, 0.0) + (percent - below) / 100
        below, before = percent, length
    return tuple(sorted(found.items()))


def _thinned(shares: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """At most ``MAX_POINTS`` lengths: the rarest long ones are kept apart, as batches hang on these."""
    if len(shares) <= MAX_POINTS:
        return shares
    kept = {shares[-1][0]}
    total = 0.0
    tail = [0.5**power for power in range(1, MAX_POINTS)]
    for length, share in shares:
        total += share
        while tail and total >= 1 - tail[0]:
            kept.add(length)
            tail.pop(0)
    found: list[tuple[int, float]] = []
    waiting = 0.0
    for length, share in shares:
        waiting += share
        if length in kept:
            found.append((length, waiting))
            waiting = 0.0
    return tuple(found)
