"""What was asked, by the options' Python names, however it was written: typed, or as keywords."""

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.options.rows.settings import FIELD_PARAMETERS, group_fields
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec

OPTION_OF_FIELD = FIELD_PARAMETERS | {"num_gpus": "gpus", "num_nodes": "nodes"}
"""The option that sets a field of ``TrainingSetup``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Every option of one question."""

    values: Values
    """By name, those left at their defaults included."""
    given: frozenset[str]
    """Names of those that were not."""

    def given_fields(self, fields: Values) -> dict[str, object]:
        """Those fields of ``TrainingSetup`` whose option was given.

        What several options make is there because one of them was given.
        """
        found = group_fields(self.values)
        for name, value in fields.items():
            if OPTION_OF_FIELD.get(name, name) in self.given:
                found.setdefault(name, value)
        return found

    def model(self, name: object) -> "ModelSpec":
        """The model of this name, read as the options say. Raises as ``load_model`` does."""
        from memplan.errors import ConfigError
        from memplan.sources.models import load_model

        values = self.values
        try:
            return load_model(
                name,  # type: ignore[arg-type]
                values["task"],
                family=values["family"],
                num_labels=values["num_labels"],
                revision=values["revision"],
                token=values["token"],
                allow_guess=values["allow_guess"],
                allow_unknown_keys=values["allow_unknown_keys"],
            )
        except ConfigError as error:
            from memplan.options.other_files import named_file

            told = named_file(name)
            if told is None:
                raise
            raise ConfigError(told) from error

    def node_memory_bytes(self) -> int | None:
        """CPU RAM of a node; None where it is not said [bytes]."""
        from memplan.options.hardware import node_memory

        memory = self.values["cpu_memory"]
        return None if memory is None else node_memory(memory)
