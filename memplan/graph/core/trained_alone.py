"""Parameters that alone are trained, by the segments that own them."""

import re
from collections.abc import Iterable, Mapping

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class TrainedAlone:
    """Which parameters of each repetition of a segment are trained; of others none is."""

    names: Mapping[str, tuple[frozenset[str], ...]]
    """By segment, for each repetition, as they are called on the tape."""
    absent: tuple[str, ...] = ()
    """Patterns that name none."""

    def trains(self, segment: str, repetition: int, parameter: str) -> bool:
        """Whether a parameter is trained in one repetition of a segment.

        >>> alone = TrainedAlone({"decoder.layers": (frozenset(), frozenset({"mlp.up_proj.weight"}))})
        >>> alone.trains("decoder.layers", 1, "mlp.up_proj.weight"), alone.cuts("decoder.layers")
        (True, {1})
        """
        rows = self.names.get(segment, ())
        return repetition < len(rows) and parameter in rows[repetition]

    def cuts(self, segment: str) -> set[int]:
        """Numbers of repetitions of which others are trained than of the one before."""
        rows = self.names.get(segment, ())
        return {each for each in range(1, len(rows)) if rows[each] != rows[each - 1]}


def matching(
    patterns: tuple[str, ...], parameters: Iterable[tuple[str, str, int, str]]
) -> TrainedAlone:
    """Those whose names begin as one of the patterns says (``re.match``).

    ``parameters``: of each its name in the class, its segment, which repetition of that, and its name on the tape.
    """
    compiled = {each: re.compile(each) for each in patterns}
    found: dict[str, list[set[str]]] = {}
    absent = dict.fromkeys(patterns)
    for full, segment, repetition, own in parameters:
        rows = found.setdefault(segment, [])
        rows += [set() for _ in range(repetition + 1 - len(rows))]
        for pattern in (each for each, what in compiled.items() if what.match(full)):
            rows[repetition].add(own)
            absent.pop(pattern, None)
    names = {name: tuple(map(frozenset, rows)) for name, rows in found.items()}
    return TrainedAlone(names, tuple(absent))
