"""What a stack does beside its layers where these mix tokens in a way of their own: a row for each way.

Masks and tables that all its layers read, a second stream that runs beside them, tokens that are embedded
otherwise. The modules are imported where a model has such layers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memplan.graph.core.tape import Tape
    from memplan.graph.stack_context import StackContext
    from memplan.model.layers import StackSpec


class StackForm(NamedTuple):
    """Which functions of a module of ``memplan.graph`` write what; empty: the usual ones do."""

    module: str
    settled: str = ""
    """The stack as it runs at a sequence length."""
    shared: str = ""
    """What all layers read: left in the context, once the tokens are embedded."""


FORMS: Mapping[str, StackForm] = {
    "BlockSparseSpec": StackForm(
        "attention.own_ways.block_sparse", settled="settled", shared="share_band_mask"
    ),
}
"""By the class of what mixes the tokens of the first layer."""


def _written(stack: StackSpec, part: str) -> Any:
    """The function that stands in the table for this part of a stack; None where there is none."""
    if not stack.runs:
        return None
    form = FORMS.get(type(stack.runs[0].layer.attention).__name__)
    name = "" if form is None else getattr(form, part)
    if form is None or not name:
        return None
    return getattr(import_module(f"memplan.graph.{form.module}"), name)


def settled(stack: StackSpec, seq_len: int) -> StackSpec:
    """The stack as its class runs it at this length."""
    write = _written(stack, "settled")
    found: StackSpec = stack if write is None else write(stack, seq_len)
    return found


def share(t: Tape, stack: StackSpec, context: StackContext) -> None:
    """Make what all layers read."""
    write = _written(stack, "shared")
    if write is not None:
        write(t, stack.runs[0].layer.attention, context)
