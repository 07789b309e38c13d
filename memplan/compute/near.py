"""What a GPU's second-level cache holds as operations follow one another: what was touched last."""

from typing import TYPE_CHECKING

from memplan.compute.rates import Rates
from memplan.compute.traffic import num_bytes_of
from memplan.graph.core.segments import Operation

if TYPE_CHECKING:
    from memplan.graph.core.tensors import Storage


class NearTensors:
    """In the cache, while one segment runs."""

    def __init__(self, rates: Rates) -> None:
        self.size = rates.cache.num_bytes
        self.near: dict[Storage, None] = {}
        """The least recent first."""
        self.near_bytes = 0
        self.saved_share = max(0.0, 1 - rates.bytes_per_s / rates.cache.bytes_per_s)
        """Of the time to read bytes from memory, what the cache saves."""

    def spared(self, operation: Operation, read: int) -> float:
        """Of the bytes it reads, as many as would take what the cache saves: what was touched last lies there."""
        near = self.near
        if not near:
            return 0.0
        found = sum([num_bytes_of(each) for each in operation.inputs if each.storage in near])
        return self.saved_share * min(found, read)

    def keep(self, operation: Operation) -> None:
        """What an operation touches drives what was touched longest ago out of the cache."""
        near, size = self.near, self.size
        for tensor in (*operation.inputs, *operation.outputs):
            storage = tensor.storage
            num_bytes = storage.num_bytes
            if num_bytes > size:
                near.clear()
                self.near_bytes = 0
            elif storage in near:
                del near[storage]  # and to the end of the line
                near[storage] = None
            else:
                near[storage] = None
                self.near_bytes += num_bytes
        while self.near_bytes > size:
            oldest = next(iter(near))
            del near[oldest]
            self.near_bytes -= oldest.num_bytes
