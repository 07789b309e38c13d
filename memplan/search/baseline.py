"""What moved since an earlier answer: rows of ``--format json``, compared one by one."""

from collections.abc import Mapping, Sequence

from memplan.estimator.estimate import ROW_QUESTIONS
from memplan.fast_dataclass import dataclass

Row = Mapping[str, object]

_SEVERITY = {"fits": 0, "states fit": 1, "tight": 1, "OOM": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What made an answer: without it nobody knows what is compared."""

    version: str = ""
    """memplan's."""
    fingerprint: str = ""
    """Of the model's shape (``memplan.model.fingerprint``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One setup on one GPU that is not what it was."""

    row: Row
    """As it is now."""
    before_bytes: int
    """The peak then."""
    after_bytes: int
    """The peak now."""
    before_verdict: str | None
    after_verdict: str | None

    @property
    def growth(self) -> float:
        """How much the peak grew, as a share of what it was."""
        if not self.before_bytes:
            return float(self.after_bytes > 0)
        return (self.after_bytes - self.before_bytes) / self.before_bytes

    def is_regression(self, tolerance: float) -> bool:
        """Whether the peak grew by more than a share, or the verdict became worse."""
        worse = _severity(self.after_verdict) > _severity(self.before_verdict)
        return worse or self.growth > tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """A setup that is asked otherwise than it was: a row of each answer, and what differs."""

    before: Row
    after: Row
    names: tuple[str, ...]
    """Columns of the question."""


MOST_CHANGES = 2
"""Columns in which two rows may differ and still be taken for one setup that was changed."""


class Baseline:
    """Rows of an earlier answer, to compare new ones with.

    A row is found by what was asked: the setup, the GPU, the task. The model's name is no part of
    it, since a path gives another name in every checkout; the shape's fingerprint says whether it
    is the same model. Rows that ask the same are told apart by their order.
    """

    def __init__(self, rows: Sequence[Row], *, origin: Origin | None = None) -> None:
        self.origin = origin
        self._names = tuple(name for name in ROW_QUESTIONS if any(name in row for row in rows))
        self._rows: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            self._rows.setdefault(self._key(row), []).append(row)
        self._params = rows[0].get("num_params") if rows else None
        self.shape_changed = False
        """The rows compared are of a model of another shape."""
        self.moves: list[Move] = []
        """Rows whose peak or verdict differs, in the order they were compared."""
        self.num_compared = 0
        self.new: list[Row] = []
        """Rows that the earlier answer did not have."""

    @property
    def gone(self) -> list[Row]:
        """Rows of the earlier answer that have not come again."""
        return [row for rows in self._rows.values() for row in rows]

    @property
    def changed(self) -> list[Changed]:
        """New rows beside those that are gone in their place, the fewest differences first."""
        pairs = sorted(
            (
                (names, before, after)
                for before in self.gone
                for after in self.new
                if len(names := self._differences(before, after)) <= MOST_CHANGES
            ),
            key=lambda pair: len(pair[0]),
        )
        taken: set[int] = set()
        found = []
        for names, before, after in pairs:
            if taken.isdisjoint((id(before), id(after))):
                taken.update((id(before), id(after)))
                found.append(Changed(before=before, after=after, names=names))
        return found

    def _differences(self, before: Row, after: Row) -> tuple[str, ...]:
        return tuple(name for name in self._names if before.get(name) != after.get(name))

    @property
    def is_matched(self) -> bool:
        """Whether every row has its counterpart, of the same model, and there are any."""
        return bool(self.num_compared) and not (self.new or self.gone or self.shape_changed)

    def judge_model(self, now: Origin) -> None:
        """Take note of what makes the new rows.

        Another version of memplan may describe the same shape otherwise: ``compare`` looks at the
        number of parameters then.
        """
        if self.origin is not None and self.origin.version == now.version:
            self.shape_changed = self.origin.fingerprint != now.fingerprint

    def compare(self, row: Row) -> None:
        """Take one new row into account."""
        self.shape_changed |= self._params is not None and row.get("num_params") != self._params
        waiting = self._rows.get(self._key(row))
        if not waiting:
            self.new.append(row)
            return
        known = waiting.pop(0)
        self.num_compared += 1
        before, after = _integer(known, "peak_bytes"), _integer(row, "peak_bytes")
        if before == after and known.get("verdict") == row.get("verdict"):
            return
        self.moves.append(
            Move(
                row=row,
                before_bytes=before,
                after_bytes=after,
                before_verdict=_text(known, "verdict"),
                after_verdict=_text(row, "verdict"),
            )
        )

    def regressions(self, tolerance: float) -> list[Move]:
        """The moves for the worse."""
        return [move for move in self.moves if move.is_regression(tolerance)]

    def _key(self, row: Row) -> tuple[object, ...]:
        return tuple(row.get(name) for name in self._names)


def _severity(verdict: str | None) -> int:
    return _SEVERITY.get(verdict or "", 0)


def _integer(row: Row, name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) else 0


def _text(row: Row, name: str) -> str | None:
    value = row.get(name)
    return value if isinstance(value, str) else None
