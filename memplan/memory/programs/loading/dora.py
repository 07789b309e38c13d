"""What making DoRA's layers takes: each weight's norm, once its adapter is there (peft 0.21)."""

from collections.abc import Sequence
from typing import Protocol

from memplan.graph.core.overlay import BASE_LAYER
from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.replaying.ledger import Ledger

MAGNITUDE = ".lora_magnitude_vector.default.weight"
_NORM = "a weight with its adapter, whose norm DoRA takes"


class Multiplying(Protocol):
    """Who makes cuBLAS's workspace with the first product."""

    def need_workspace(self, *, forward: bool) -> None:
        """A product of matrices is next."""


def measure_weights(
    ledger: Ledger, weights: Sequence[tuple[Parameter, int]], playback: Multiplying
) -> None:
    """``DoraLinearLayer.update_layer`` of every adapted layer, in their order.

    A copy of packed codes and what they unpack to; the adapter's product, the same scaled, and the sum
    (``get_weight_norm``). The adapter has the base's format then; peft casts it to fp32 when all are there.
    """
    bases = {(weight.name, copy): weight for weight, copy in weights}
    kind = ComponentKind.TEMPORARIES
    for magnitude, copy in weights:
        prefix = magnitude.name.removesuffix(MAGNITUDE)
        base = bases.get((f"{prefix}{BASE_LAYER}.weight", copy))
        if prefix == magnitude.name or base is None:
            continue
        unpacked = []
        dtype = base.dtype
        if base.packed is not None:
            dtype = base.packed.loaded
            copied = base.storage.num_bytes
            unpacked = [
                ledger.allocate(size, 0, kind, _NORM)
                for size in (copied, allocated_bytes(base.packed.numel, dtype))
            ]
        rows, columns = base.matrix_shape[-2:]
        size = allocated_bytes(rows * columns, dtype)
        product = ledger.allocate(size, 0, kind, _NORM)
        playback.need_workspace(forward=True)
        scaled = ledger.allocate(size, 0, kind, _NORM)
        total = ledger.allocate(size, 0, kind, _NORM)
        ledger.free(scaled)
        ledger.free_all([total, *unpacked, product])
