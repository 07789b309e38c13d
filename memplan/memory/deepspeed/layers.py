"""Parameters of equal layers, by where they stand from one of these."""

from collections.abc import Iterable
from typing import NamedTuple

Placed = tuple[bool, int]
"""Whether a parameter is one of the layers', and its number: then as it would be in the first of them."""


class Layers(NamedTuple):
    """A run of equal layers, seen from one of them.

    >>> layers = Layers(first=10, stride=3, copies=4, copy=2)
    >>> layers.place(16), layers.place(19), layers.place(5)
    ((True, 10), (True, 13), (False, 5))
    >>> layers.moved(16, -1), layers.moved(5, -1)
    (13, 5)
    """

    first: int
    """The number of the first parameter of all."""
    stride: int
    """Parameters of each layer."""
    copies: int
    """How many layers there are."""
    copy: int
    """The one that they are seen from."""

    def place(self, number: int) -> Placed:
        """Where a parameter stands, as seen from the layer."""
        ahead = number - self.first
        if 0 <= ahead < self.stride * self.copies:
            return True, number - self.stride * self.copy
        return False, number

    def moved(self, number: int, copies: int) -> int:
        """The parameter that stands as many layers on as this one."""
        if 0 <= number - self.first < self.stride * self.copies:
            return number + self.stride * copies
        return number

    def all_moved(self, numbers: Iterable[int], copies: int) -> list[int]:
        """The same of several.

        >>> Layers(first=10, stride=3, copies=4, copy=2).all_moved([16, 5], -1)
        [13, 5]
        """
        further, first = self.stride * copies, self.first
        end = first + self.stride * self.copies
        return [number + further if first <= number < end else number for number in numbers]
