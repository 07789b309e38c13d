"""How the experts of a mixture are spread over ranks, as data."""

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallel:
    """Whole experts spread over the ranks of a group, to which tokens are sent (torchtitan).

    >>> ExpertParallel(degree=8).words
    'experts spread over 8 ranks (all-to-all), each given as many tokens as the others'
    """

    degree: int
    """Ranks of which each has other experts."""
    imbalance: float = 1.0
    """Tokens that the experts of the rank looked at are given, over an even share."""

    @property
    def words(self) -> str:
        """What people read of it."""
        if self.imbalance == 1:
            share = "as many tokens as the others"
        else:
            share = f"{self.imbalance:g} times an even share of the tokens"
        return f"experts spread over {self.degree} ranks (all-to-all), each given {share}"
