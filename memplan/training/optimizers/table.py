"""The table: one row for each optimizer. Adding one is adding a name and a row.

Rows stand with their kin, and only AdamW and SGD are loaded with the table.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module

from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import OptimizerRow, Options, options_of
from memplan.training.optimizers.torch_rows import ROWS
from memplan.upward import provided

_KIN = (
    "more_torch", "factored", "bitsandbytes", "torchao", "low_rank", "lomo", "published",
    "transformer_engine",
)  # fmt: skip
"""Modules beside this one that hold further rows."""


@cache
def all_rows() -> Mapping[Optimizer, OptimizerRow]:
    """Every optimizer's row."""
    found = dict(ROWS)
    for name in _KIN:
        module = import_module(f"memplan.training.optimizers.{name}")
        found.update(module.ROWS)
    return {optimizer: found[optimizer] for optimizer in Optimizer}


def row_of(optimizer: Optimizer) -> OptimizerRow:
    """An optimizer's row."""
    row = ROWS.get(optimizer)
    if row is None and optimizer.name not in Optimizer.__members__:
        own: OptimizerRow = provided("plugged", "optimizers", optimizer.value)
        return own
    return all_rows()[optimizer] if row is None else row


@cache
def chosen(optimizer: Optimizer, options: Options) -> tuple[OptimizerRow, Options]:
    """A row with its settings, those given filled in."""
    row = row_of(optimizer)
    return row, options_of(row, dict(options), optimizer.value)
