"""What names a model, whoever asks."""

import os
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from memplan.model.spec import ModelSpec


@runtime_checkable
class ConfigObject(Protocol):
    """A config that can tell its keys, as transformers' ``PretrainedConfig`` does."""

    def to_dict(self) -> Mapping[str, object]:
        """Its keys, as in a config.json."""


Model = str | os.PathLike[str] | Mapping[str, object] | ConfigObject | ModelSpec
"""A built-in name, a hub id, a path, a config dict, transformers' own config or a spec."""
