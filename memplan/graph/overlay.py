"""What the tape asks of an adapter that is laid over a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from memplan.graph.tensors import Parameter, Tensor

BASE_LAYER = ".base_layer"
"""What an adapted module is called within the one that takes its place."""
ORIGINAL = ".original_module"
"""What a module is called of which a copy is trained, within peft's ``ModulesToSaveWrapper``."""
Ranks = Mapping[str, int]
"""Modules of one layer, in the tape's words, and the rank of each one's adapter."""


class Overlay(Protocol):
    """An adapter over a model, whose own weights are frozen.

    Segments go by their name, and by how often segments of that name were repeated before.
    """

    @property
    def num_prompts(self) -> int:
        """Trained tokens before every sequence."""

    def prompted(self, t: Any, x: "Tensor") -> "Tensor":
        """Set them before looked-up tokens."""

    def at(self, name: str, repetition: int) -> Ranks:
        """What is adapted in one repetition."""

    def saves(self, name: str, repetition: int, module: str) -> bool:
        """Whether a copy of a module, or of one that it is in, is trained."""

    def trains_bias(self, module: str, ranks: Ranks) -> bool:
        """Whether a module's own bias is trained."""

    def cuts(self, name: str) -> set[int]:
        """Numbers of repetitions that are not adapted as the one before."""

    def beside_linear(
        self,
        t: Any,
        x: "Tensor",
        out: "Tensor",
        weight: "Parameter",
        bias: "Parameter | None",
        module: str,
    ) -> "Tensor":
        """Record on tape ``t`` what an adapted linear layer does with its result."""

    def before_linear(self, t: Any, x: "Tensor", width: int, module: str) -> "Tensor":
        """Record what an adapted linear layer does with its input."""

    def beside_embedding(
        self, t: Any, out: "Tensor", weight: "Parameter", ids: "Tensor | None", module: str
    ) -> "Tensor":
        """Record what an adapted embedding does with its result."""

    def declare(self, t: Any, weight: "Parameter", module: str) -> None:
        """Declare the adapter of a module that is counted, not written down."""
