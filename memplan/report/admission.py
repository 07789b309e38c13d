"""Whether a job may start, for people."""

from typing import TYPE_CHECKING

from memplan.report.lookups.doctor import print_rows

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console
    from memplan.search.admission import Admission, Confidence


def print_admission(console: "Console", found: "Admission") -> None:
    """The answer, a line for each pool, and how far it is to be trusted."""
    from memplan.report.terminal.console import Text

    chosen = found.chosen
    head = (
        f"Admitted to {chosen.pool.name}"
        if found.admitted and chosen is not None
        else "Not admitted"
    )
    console.print(Text(head, style="bold"))
    print_rows(
        console, [(each.pool.name, each.pool.gpu.short_name, each.reason) for each in found.pools]
    )
    console.print(Text(confidence_text(found.confidence)))


def confidence_text(found: "Confidence") -> str:
    """What became of real runs that were said to fit."""
    if not found.num_fits:
        return f"No real run of this kind ({found.kind}) was compared: the verdict is a computation alone"
    runs = "run" if found.num_fits == 1 else "runs"
    return f"Of {found.num_fits} real {runs} of this kind ({found.kind}) that were said to fit, {found.num_false} died"
