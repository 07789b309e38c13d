"""What the layers of a stack share, and hand from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass, field

if TYPE_CHECKING:
    from memplan.graph.core.tensors import Tensor
    from memplan.model.attention import AttentionSpec


@dataclass(slots=True)
class StackContext:
    """What the layers of a stack share: sizes, position tables, masks."""

    hidden_size: int
    batch: int
    seq_len: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    has_masks: bool = False
    """They have been made."""
    mask: Tensor | None = None
    """None where the kernel knows the pattern itself."""
    sliding_mask: Tensor | None = None
    """For layers with a sliding window."""
    memory: Tensor | None = None
    """The encoder's output, in a decoder."""
    memory_len: int = 0
    memory_mask: Tensor | None = None
    """Which of it each token sees, where it is pictures."""
    memory_rows: Tensor | None = None
    """Whether each token sees any of it."""
    handed_on: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values that later layers read, of layers with and without a window (Gemma 4)."""
    residual: Tensor | None = None
    """What the layer's network is going to be added to."""
    beside: Tensor | None = None
    """The stream that runs beside the hidden states, from layer to layer (LiLT)."""
    vectors: Tensor | None = None
    """The vectors that each layer has of its own for each token (Gemma 4)."""
    attention_frame: tuple[Tensor, ...] = ()
    """What an attention module still holds while it adds the residual itself (BLOOM)."""
    attention_variables: tuple[Tensor, ...] = ()
    """What it holds until it returns, a dropout of its own included (GPT-2)."""
    local_cos: Tensor | None = None
    local_sin: Tensor | None = None
    """Tables of their own for layers with a sliding window (Gemma 3)."""

    def tables_of(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        """Those of layers with and without compressed entries (DeepSeek-V4)."""
        pair = (self.local_cos, self.local_sin) if compressed else (self.cos, self.sin)
        assert pair[0] is not None
        assert pair[1] is not None
        return pair[0], pair[1]

    def tables(self, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Cosines and sines for one kind of layer."""
        cos, sin = self.cos, self.sin
        if spec.sliding_window is not None and self.local_cos is not None:
            cos, sin = self.local_cos, self.local_sin
        if cos is None or sin is None:
            msg = "a layer turns its heads, but the stack has made no tables"
            raise ValueError(msg)
        return cos, sin
