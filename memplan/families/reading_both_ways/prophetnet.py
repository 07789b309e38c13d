"""ProphetNet: written as a class, but for its decoder alone, one without cross attention, and label smoothing.

Those are counted (``memplan.families.reading_both_ways.bart_variants``).
"""

from memplan.families import written_once
from memplan.families.reading_both_ways import bart_variants
from memplan.families.request import ReadRequest
from memplan.model.config import ConfigReader
from memplan.model.spec import ModelSpec


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of ProphetNet."""
    alone = request.task is None and bart_variants.names_decoder(reader)
    smoothed = reader.number("eps", default=0.0) > 0.0
    if alone or smoothed or not reader.flag("add_cross_attention", default=True):
        return bart_variants.read(reader, request)
    return written_once.read(reader, request)
