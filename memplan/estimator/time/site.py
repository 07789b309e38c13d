"""The machines that a step runs on, beside their cards: what memplan takes for granted unless it is told."""

from memplan.compute.host import HostFactors, HostSpeed, host_factors
from memplan.errors import InputError
from memplan.estimator.time.calibration import Calibration
from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What a card's own data do not say of the machines that it is in.

    >>> Site(host=2.0).host_factors.expected
    2.0
    """

    host: HostSpeed | float = HostSpeed.USUAL
    """How fast its host asks for kernels, or how many times as long as the usual one it takes."""
    between_nodes: float | None = None
    """What one GPU sends to other nodes, nominally [bytes/s]; None: what nodes of these cards are sold with."""
    oversubscription: float = 1.0
    """How many times as much 32 nodes send as their switches pass on to others."""
    in_network_reduction: bool = False
    """The switches between nodes add up all-reduces (SHARP)."""
    loaded_per_s: float | None = None
    """Sequences, pictures or clips that the loaders of one node make ready in a second; None: they keep up."""
    calibration: Calibration | None = None
    """What a step that was measured there says."""

    def __post_init__(self) -> None:
        if not isinstance(self.host, HostSpeed) and not self.host > 0:
            msg = f"host: must be above 0, got {self.host}; 2 is a host that takes twice as long as the usual one"
            raise InputError(msg)
        if not self.oversubscription >= 1:
            msg = f"oversubscription: must be at least 1, got {self.oversubscription}; 2 is a network whose upper half is half as wide"
            raise InputError(msg)

        if self.loaded_per_s is not None and not self.loaded_per_s > 0:
            msg = f"loader: must be above 0 samples in a second, got {self.loaded_per_s}"
            raise InputError(msg)

    @property
    def host_factors(self) -> HostFactors:
        """Low, expected and high; a calibration that has the host's speed has it beside the usual one's."""
        is_measured = self.calibration is not None and self.calibration.host != 1.0
        return host_factors(HostSpeed.USUAL if is_measured else self.host)

    @property
    def named_network(self) -> float | None:
        """What one GPU sends to other nodes where somebody said it, here or when a step was measured [bytes/s]."""
        if self.between_nodes is not None or self.calibration is None:
            return self.between_nodes
        return self.calibration.between_nodes


USUAL_SITE = Site()
