"""Parts that stand by themselves: norms, linear layers, nonlinearities; what a task leaves idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.norms import NormKind, NormSpec

if TYPE_CHECKING:
    from memplan.model.networks import Activation


LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)


RMS_NORM = NormSpec(kind=NormKind.RMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormBody:
    """A norm by itself."""

    module: str
    size: int
    norm: NormSpec = LAYER_NORM
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearBody:
    """A linear layer by itself."""

    module: str
    inputs: int
    outputs: int
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationBody:
    """A nonlinearity by itself."""

    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class SpareBody:
    """What the class owns and this task does not use."""

    runs: bool = False
    """It is computed nonetheless, and let go: autocast's copies of its matrices stay in its cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedBody:
    """Two linear layers on the same, one of them through a nonlinearity, their product through a third."""

    module: str
    """What ``gate_proj``, ``fc1`` and ``fc2`` are in; empty: nothing."""
    inputs: int
    inner: int
    outputs: int
    activation: Activation
    bias: bool = True


PartBody = SpareBody | NormBody | LinearBody | ActivationBody | GatedBody
