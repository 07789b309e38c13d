"""An earlier answer: what ``--format json`` wrote."""

from collections.abc import Mapping
from pathlib import Path

from memplan.errors import ConfigError
from memplan.estimator.estimate import SCHEMA_VERSION
from memplan.search.baseline import Baseline


def read_baseline(path: str | Path) -> Baseline:
    """Read the rows of an earlier ``memplan sweep`` or ``memplan estimate``.

    Raises ``ConfigError`` for a file that cannot be read or is of another form.
    """
    from memplan.sources.files import read_json_mapping

    document = read_json_mapping(path)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        msg = (
            f"{path}: schema_version: {version!r} is not {SCHEMA_VERSION}; write the baseline "
            "again with --format json"
        )
        raise ConfigError(msg)
    rows = document.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        msg = f"{path}: rows: expected the list of rows that --format json writes"
        raise ConfigError(msg)
    for number, row in enumerate(rows):
        if not isinstance(row.get("peak_bytes"), int):
            msg = f"{path}: rows[{number}].peak_bytes: expected a whole number of bytes"
            raise ConfigError(msg)
    return Baseline(rows)
