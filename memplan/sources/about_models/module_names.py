"""What transformers' classes call their modules, by ``model_type``."""

from collections.abc import Mapping
from typing import Any

from memplan.model.spec import ModelSpec
from memplan.sources.about_models.entry_file import EntryFile

_FILE = EntryFile(file_name="module_names.json", section="types", indent=2)


def module_names(model: ModelSpec) -> Mapping[str, Any]:
    """Names by the tape's segments; empty for a type whose names are Llama's.

    ``at`` is what all names of a segment begin with, ``{}`` in it the layer's number; the others are
    modules of the tape whose own names differ.
    """
    return _FILE.entry(model.family) or {}
