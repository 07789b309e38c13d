"""What moved since an earlier answer: rows of ``--format json``, compared one by one."""

from collections.abc import Mapping, Sequence

from memplan.records import dataclass

Row = Mapping[str, object]

RESULTS = frozenset({
    "num_params", "trainable_params", "gpu_capacity_bytes", "attention_kernel", "peak_bytes",
    "peak_phase", "held_bytes", "host_bytes", "total_low_bytes", "total_high_bytes", "verdict",
    "left_out",
})  # fmt: skip
"""Columns that are answers; so is every other one that ends in ``_bytes``. The rest say what was
asked, and name the row."""
_SEVERITY = {"fits": 0, "states fit": 1, "tight": 1, "OOM": 2}


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


class Baseline:
    """Rows of an earlier answer, to compare new ones with."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._names = tuple(name for name in (rows[0] if rows else ()) if is_question(name))
        self._rows = {self._key(row): row for row in rows}
        self._seen: set[tuple[object, ...]] = set()
        self.moves: list[Move] = []
        """Rows whose peak or verdict differs, in the order they were compared."""
        self.num_compared = 0
        self.num_new = 0
        """Rows that the earlier answer did not have."""

    @property
    def num_gone(self) -> int:
        """Rows of the earlier answer that have not come again."""
        return len(self._rows) - len(self._seen)

    def compare(self, row: Row) -> None:
        """Take one new row into account."""
        key = self._key(row)
        known = self._rows.get(key)
        if known is None:
            self.num_new += 1
            return
        self._seen.add(key)
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


def is_question(name: str) -> bool:
    """Whether a column says what was asked, rather than what was answered.

    >>> is_question("zero_stage"), is_question("forward_peak_bytes")
    (True, False)
    """
    return name not in RESULTS and not name.endswith("_bytes")


def _severity(verdict: str | None) -> int:
    return _SEVERITY.get(verdict or "", 0)


def _integer(row: Row, name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) else 0


def _text(row: Row, name: str) -> str | None:
    value = row.get(name)
    return value if isinstance(value, str) else None
