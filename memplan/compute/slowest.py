"""The slowest of many GPUs: ranks wait for one another in every step, so a step takes as long as it takes the slowest of them.

Cards of one kind compute at different speeds: chips differ in the voltage that a clock asks for, and so in the clock that a limit of
power leaves them.

References
----------
.. [1] P. Sinha et al., "Not All GPUs Are Created Equal", SC 2022, arXiv:2208.11035: the same work varies by 8 % between GPUs of one kind
   in one cluster, averaged over clusters and applications (abstract; nine in ten of their GPUs were measured).
.. [2] G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958: the expected largest of n normal values.
"""

from functools import lru_cache
from statistics import NormalDist

SPREAD = 0.08 / 5.4
"""Standard deviation of what the same work takes GPUs of one kind, as a share: [1]'s variation is taken to be what lies between
the whiskers of a box plot, 5.4 deviations of a normal distribution (an assumption: of the paper only the abstract was read)."""
BLOM = 0.375


@lru_cache(maxsize=256)
def slowest_factor(num_gpus: int) -> float:
    """How many times as long the slowest of so many GPUs computes as one of its kind.

    Equation: ``1 + SPREAD Φ⁻¹((n - 3/8) / (n + 1/4))`` [2]_.

    >>> [round(slowest_factor(each), 3) for each in (1, 8, 128, 16384)]
    [1.0, 1.021, 1.038, 1.059]
    """
    rank = (num_gpus - BLOM) / (num_gpus + 1 - 2 * BLOM)
    return 1 + SPREAD * NormalDist().inv_cdf(rank)
