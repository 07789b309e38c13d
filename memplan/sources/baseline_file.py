"""An earlier answer: what ``--format json`` wrote."""

from collections.abc import Mapping
from pathlib import Path

from memplan.errors import ConfigError
from memplan.estimator.estimate import ROW_QUESTIONS, SCHEMA_VERSION, Verdict
from memplan.search.baseline import Baseline, Origin
from memplan.text import shown

_AGAIN = "write the baseline again, as JSON"


def read_baseline(path: str | Path) -> Baseline:
    """Read the rows of an earlier ``memplan sweep`` or ``memplan estimate``.

    Raises ``ConfigError`` for a file that cannot be read or is of another form.
    """
    from memplan.sources.files import read_json_mapping

    document = read_json_mapping(path)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        msg = f"{path}: schema_version: {shown(version)} is not {SCHEMA_VERSION}; {_AGAIN}"
        raise ConfigError(msg)
    origin = Origin(
        version=_said(document, "memplan_version", source=path),
        fingerprint=_said(document, "model_fingerprint", source=path),
    )
    rows = document.get("rows")
    if not isinstance(rows, list):
        msg = f"{path}: rows: expected the list of rows that the JSON format has, got {shown(rows)}"
        raise ConfigError(msg)
    return Baseline(
        [_row(row, f"rows[{number}]", source=path) for number, row in enumerate(rows)],
        origin=origin,
    )


def _said(document: Mapping[str, object], key: str, *, source: str | Path) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        problem = "is missing" if value is None else f"expected text, got {shown(value)}"
        msg = f"{source}: {key}: {problem}; {_AGAIN}"
        raise ConfigError(msg)
    return value


def _row(row: object, place: str, *, source: str | Path) -> Mapping[str, object]:
    """A row of which every value that is compared has its type."""
    if not isinstance(row, Mapping):
        msg = f"{source}: {place}: expected a row, got {shown(row)}"
        raise ConfigError(msg)
    for name in ("peak_bytes", "num_params"):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOO_LARGE:
            msg = f"{source}: {place}.{name}: expected a whole number from 0 up, got {shown(value)}"
            raise ConfigError(msg)
    if row.get("verdict") not in _VERDICTS:
        known = ", ".join(str(each) for each in _VERDICTS if each)
        msg = f"{source}: {place}.verdict: {shown(row.get('verdict'))} is not one of {known}"
        raise ConfigError(msg)
    for name in ROW_QUESTIONS:
        if not isinstance(row.get(name), str | int | float | None):
            msg = f"{source}: {place}.{name}: expected a single value, got {shown(row[name])}"
            raise ConfigError(msg)
    return row


_TOO_LARGE = 2**63
_VERDICTS = [None, *(each.value for each in Verdict)]
