"""Two estimates side by side, as a value."""

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass
from memplan.report.rows.documents import document
from memplan.upward import Displayed


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Displayed):
    """What moved from the one to the other."""

    one: Estimate
    other: Estimate

    @property
    def difference_bytes(self) -> int:
        """How much more the other needs, at the low end of the range [bytes]."""
        return self.other.total_bytes.low - self.one.total_bytes.low

    @property
    def components(self) -> dict[str, int]:
        """How much more of each component the other has at the moment that decides [bytes]."""
        from memplan.report.versus import component_figures

        found = component_figures(self.one, self.other)
        return {name: second - first for name, first, second in found}

    def rows(self) -> list[dict[str, object]]:
        """Flat rows, as ``memplan compare --format json`` has them."""
        from memplan.estimator.time.run_cost import TimeQuestion
        from memplan.report.versus import Side, versus_rows
        from memplan.search.advice import hints_for

        one, other = (
            Side(label=label, name=label, answer=each, hints=hints_for(each.model, [[each]]))
            for label, each in (("one", self.one), ("other", self.other))
        )
        return versus_rows((one, other), TimeQuestion())

    def to_dict(self) -> dict[str, object]:
        """The document that ``memplan compare --format json`` writes."""
        from memplan.report.versus import VERSUS_SCHEMA_VERSION

        said = dict.fromkeys((*self.one.assumptions, *self.other.assumptions))
        return document(self.rows(), schema_version=VERSUS_SCHEMA_VERSION, assumptions=list(said))

    def __repr__(self) -> str:
        return f"Comparison({self.one!r}, {self.other!r})"
