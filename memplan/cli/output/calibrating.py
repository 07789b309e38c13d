"""``memplan verify --calibrate``: how fast this node is, for every command that tells times."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.verify.node_timing import Timed


def calibrate(path: Path) -> None:
    """Time this node and write what that says; on ranks that are not the first, take part alone."""
    from datetime import UTC, datetime

    from memplan.cli.output.terminal import remark, say, write_file
    from memplan.sources.cards.calibration_file import calibration_text
    from memplan.verify.run import require_packages

    require_packages()
    from memplan.verify.on_torch.timing import node_times

    date = datetime.now(UTC).date().isoformat()
    found = node_times(date)
    if found is None:
        return
    write_file(path, calibration_text(found.calibration, date=date), option="--calibrate")
    say("\n".join(lines_of(found.timed)))
    remark(f"wrote {path}: {found.calibration.words}; read it with --calibration {path}")


def lines_of(timed: "Sequence[Timed]") -> list[str]:
    """What was measured beside what was said, a line each."""
    width = max(len(each.words) for each in timed)
    return [
        f"{each.words:{width}}  {1000 * each.measured_s:9.3f} ms, said {1000 * each.said_s:9.3f} ms: "
        f"x {each.measured_s / each.said_s:.2f} ({each.part.value})"
        for each in timed
    ]
