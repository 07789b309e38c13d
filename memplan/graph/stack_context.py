"""What the layers of a stack share, and hand from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.graph.core.tensors import Tensor


@dataclass(slots=True)
class StackContext:
    """What the layers of an encoder share: sizes, a mask."""

    hidden_size: int
    batch: int
    seq_len: int
    mask: Tensor | None = None
    """None where nothing is added to scores."""
    beside: Tensor | None = None
    """The stream that runs beside the hidden states, from layer to layer (LXMERT)."""
    attention_frame: tuple[Tensor, ...] = ()
    """What an attention module still holds while the layer adds the residual."""
