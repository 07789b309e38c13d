"""What became of real runs, by kind of job and by what memplan had said: ``data/outcomes.json``, which ``make accuracy`` writes.

Each run is one of the accuracy page's verdicts: measured for memplan, sent by ``memplan verify``, or published by others.
"""

import json
from importlib.resources import files

from memplan.search.admission import Confidence


def confidence_of(kind: str) -> Confidence:
    """How often a job of this kind was said to fit, and how often that was false.

    >>> confidence_of("fsdp").num_fits > 100
    True
    """
    text = (files("memplan") / "data" / "outcomes.json").read_text(encoding="utf-8")
    fits = [each.get(kind, {}).get("fits", {}) for each in json.loads(text).values()]
    return Confidence(
        kind=kind,
        num_fits=sum(sum(each.values()) for each in fits),
        num_false=sum(each.get("died", 0) for each in fits),
    )
