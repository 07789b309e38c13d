"""What the tape asks of a quantized base."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from memplan.graph.core.tensors import Parameter, Tensor


class Quantizer(Protocol):
    """How the weights of linear layers are packed, and multiplied."""

    def pack(self, t: Any, whole: "Parameter") -> "Parameter":
        """Put codes in the place of the weight that tape ``t`` has just declared, unless it stays."""

    def product(
        self, t: Any, x: "Tensor", weight: "Parameter", bias: "Parameter | None"
    ) -> "Tensor":
        """Record ``x @ weight.T + bias`` for a packed weight."""
