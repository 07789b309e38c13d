"""Sizes that hang on a batch, found from a few runs: sums of products of at most two symbols."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from memplan.errors import TraceError
from memplan.model.traced import SYMBOLS, Size

Sizes = dict[str, int]
"""A batch: each symbol's value."""
Powers = tuple[int, ...]
LEAST_LENGTH = 8


@dataclass(frozen=True)
class Points:
    """Batches to run, one for each term of a size, and one more that proves the rest."""

    terms: tuple[Powers, ...]
    all: tuple[Sizes, ...]

    def fitting(self) -> "Fitting":
        """What finds the terms of a dimension."""
        return Fitting(self)


def points_for(example: Sizes) -> Points:
    """Batches as large as the example or smaller, so that no context length is exceeded.

    >>> points_for({"batch_size": 2, "seq_len": 64}).all[:3]
    ({'batch_size': 2, 'seq_len': 64}, {'batch_size': 3, 'seq_len': 64}, {'batch_size': 2, 'seq_len': 48})
    """
    base = {
        "batch_size": 2,
        **{name: size for name, size in example.items() if name != "batch_size"},
    }
    lengths = [name for name in base if name != "batch_size"]
    for name in lengths:
        if base[name] < LEAST_LENGTH:
            msg = (
                f"trace: the example's {name} is {base[name]}: give one of {LEAST_LENGTH} at least"
            )
            raise TraceError(msg)
    other = {"batch_size": 3, **{name: base[name] * 3 // 4 for name in lengths}}
    pairs = [("batch_size", name) for name in lengths]
    changed: list[tuple[str, ...]] = [(), *((name,) for name in base), *pairs]
    proof = {"batch_size": 5, **{name: base[name] // 2 for name in lengths}}
    batches = [base | {name: other[name] for name in names} for names in changed]
    terms = tuple(tuple(int(name in names) for name in SYMBOLS) for names in changed)
    return Points(terms, (*batches, proof))


class Fitting:
    """Collects sizes, each once."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self.found: list[Size] = []
        self._known: dict[tuple[int, ...], int] = {}

    def add(self, observed: Sequence[int]) -> int:
        """The place of the size that had these values in the runs.

        Raises ``TraceError`` where it is no such sum.
        """
        key = tuple(observed)
        if key not in self._known:
            self._known[key] = len(self.found)
            self.found.append(self._fit(key))
        return self._known[key]

    def _fit(self, observed: tuple[int, ...]) -> Size:
        terms, batches = self._points.terms, self._points.all
        rows = [[Fraction(_product(batch, term)) for term in terms] for batch in batches]
        solved = _solve(rows[:-1], [Fraction(each) for each in observed[:-1]])
        proved = sum(share * number for share, number in zip(solved, rows[-1], strict=True))
        if proved != observed[-1]:
            msg = f"trace: a size of {observed} hangs on the batch in a way that no sum of products says"
            raise TraceError(msg)
        return Size(
            tuple(
                (share.numerator, share.denominator, term)
                for share, term in zip(solved, terms, strict=True)
                if share
            )
        )


def _product(batch: Sizes, powers: Powers) -> int:
    product = 1
    for name, power in zip(SYMBOLS, powers, strict=True):
        product *= batch.get(name, 1) ** power
    return product


def _solve(rows: list[list[Fraction]], right: list[Fraction]) -> list[Fraction]:
    """Gauss's elimination over fractions."""
    size = len(rows)
    table = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for column in range(size):
        pivot = next(row for row in range(column, size) if table[row][column])
        table[column], table[pivot] = table[pivot], table[column]
        head = table[column][column]
        table[column] = [each / head for each in table[column]]
        for row in range(size):
            if row != column and table[row][column]:
                factor = table[row][column]
                table[row] = [
                    a - factor * b for a, b in zip(table[row], table[column], strict=True)
                ]
    return [row[-1] for row in table]
