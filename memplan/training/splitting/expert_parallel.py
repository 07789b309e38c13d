"""How the experts of a mixture are spread over ranks, as data."""

import re

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.text import shown

MAX_IMBALANCE = 1024
_RANGE = re.compile(r"\s*([0-9.]+?)\s*(?:(?:\.\.|-)\s*([0-9.]+?)\s*)?")


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Tokens that the experts of the fullest rank are given, over an even share: routers decide it.

    >>> str(Imbalance(1, 1.5)), str(Imbalance(2, 2))
    ('1-1.5', '2')
    """

    low: float
    high: float

    @classmethod
    def read(cls, value: object) -> "Imbalance":
        """A number, or a range: ``1.5``, ``"1-1.5"``, ``"1..1.5"``.

        Raises ``SetupError``.

        >>> Imbalance.read("1..1.5").high
        1.5
        """
        if isinstance(value, cls):
            return value
        found = None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found = (float(value), float(value))
        elif isinstance(value, str):
            found = _ends(value)
        if found is None or not 1 <= found[0] <= found[1] <= MAX_IMBALANCE:
            msg = (
                f"expert_imbalance: must be from 1 (balanced) to {MAX_IMBALANCE} times an even share of the "
                f"tokens, or a range such as 1-1.5, got {shown(value)}"
            )
            raise SetupError(msg)
        return cls(*found)

    def __str__(self) -> str:
        low = f"{self.low:g}"
        return low if self.low == self.high else f"{low}-{self.high:g}"

    @property
    def is_range(self) -> bool:
        """Whether its ends differ."""
        return self.low < self.high


def _ends(text: str) -> tuple[float, float] | None:
    found = _RANGE.fullmatch(text)
    try:
        low, high = found.groups() if found else ("", "")
        return float(low), float(high or low)
    except ValueError:
        return None


USUAL_IMBALANCE = Imbalance(1.0, 1.25)
"""From balanced to the larger of the two capacity factors with which Switch Transformers do best, 1 and 1.25
(Fedus et al., arXiv:2101.03961, section 2.2 and table 1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallel:
    """Whole experts spread over the ranks of a group, to which tokens are sent (torchtitan).

    >>> ExpertParallel(degree=8).words
    'experts spread over 8 ranks (all-to-all), the fullest given as many tokens as the others'
    """

    degree: int
    """Ranks of which each has other experts."""
    imbalance: Imbalance = Imbalance(1, 1)
    """Of the rank looked at; of a range its low end is recorded."""

    @property
    def words(self) -> str:
        """What people read of it."""
        share = "as many tokens as the others"
        if self.imbalance != Imbalance(1, 1):
            share = f"{self.imbalance} times an even share of the tokens"
        usual = " (default)" * (self.imbalance == USUAL_IMBALANCE)
        return f"experts spread over {self.degree} ranks (all-to-all), the fullest given {share}{usual}"
