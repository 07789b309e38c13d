"""A model's weights on one rank, in the order of ``named_parameters()``, and the buffers between them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from memplan.graph.core.segments import Buffer, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.graph.declaration import declared_parameters
from memplan.graph.remembered import OF_TAPES
from memplan.model.parameters import ModelPart

Weight = tuple[Parameter, int]
"""A parameter of a segment, and which of the segment's copies it is of."""
Places = Mapping[Weight | None, Sequence[Buffer]]
"""The buffers that stand before each weight; None: behind all of them."""


@OF_TAPES.remembered(maxsize=8)
def weights_of(tape: Tape) -> tuple[Weight, ...]:
    """Every parameter of every copy of its segment, in the order of ``named_parameters()``."""
    return tuple(
        (parameter, copy)
        for segment, parameters in declared_parameters(tape)
        for copy in range(segment.num_copies)
        for parameter in parameters
    )


class Run(NamedTuple):
    """Weights one after another, between which no buffer stands."""

    before: Sequence[Buffer]
    """The buffers that stand before them."""
    weights: Sequence[Weight]
    sizes: Sequence[tuple[int, Weight]]
    """Of the same weights, as they are loaded [bytes]."""


@OF_TAPES.remembered(maxsize=8)
def runs_of(tape: Tape) -> tuple[Run, ...]:
    """All weights and buffers, in the order in which ``Module.to`` takes them; the last run may have no weight."""
    places = buffers_before(tape)
    runs: list[tuple[Sequence[Buffer], list[Weight]]] = [((), [])]
    for weight in _as_moved(tape):
        if weight in places:
            runs.append((places[weight], []))
        runs[-1][1].append(weight)
    runs.append((places.get(None, ()), []))
    return tuple(
        Run(before, weights, [(each[0].storage.num_bytes, each) for each in weights])
        for before, weights in runs
    )


def _as_moved(tape: Tape) -> Iterator[Weight]:
    """Every weight of every copy of its segment, those of a module behind those of its children (``Module._apply``)."""
    for segment, parameters in declared_parameters(tape):
        moved = children_first(parameters)
        for copy in range(segment.num_copies):
            for parameter in moved:
                yield parameter, copy


def children_first(parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    """The same weights, each behind all that stand in modules inside of its own."""
    last: dict[str, int] = {}
    for number, each in enumerate(parameters):
        outer = each.module
        while outer:
            outer = outer.rpartition(".")[0]
            last[outer] = number
    if not any(each.module in last for each in parameters):
        return parameters
    ranked = [
        (last.get(each.module, number), -each.module.count(".") - bool(each.module), number)
        for number, each in enumerate(parameters)
    ]
    return [parameters[number] for *_, number in sorted(ranked)]


@OF_TAPES.remembered(maxsize=8)
def buffers_before(tape: Tape) -> Places:
    """The buffers that stand before each weight, once for each copy of their segment."""
    found: dict[Weight | None, list[Buffer]] = {}
    declared: dict[Segment, list[Parameter]] = {}
    for segment, parameters in declared_parameters(tape):
        declared.setdefault(segment, []).extend(parameters)
    for each in tape.buffers:
        for copy in range(each.segment.repeat):
            anchor = _next_weight(tape, each, copy, declared)
            found.setdefault(anchor, []).append(each)
    return found


def _next_weight(
    tape: Tape, buffer: Buffer, copy: int, declared: dict[Segment, list[Parameter]]
) -> Weight | None:
    """The weight declared next: of its module, of this copy, of the next one, or of a later segment."""
    segment, position = buffer.segment, buffer.position
    if buffer.behind:
        head = tape.segments[-1]  # stands beside the model whose last module it is of
        own = declared.get(head, [])
        return (own[0], 0) if own and head.part is ModelPart.HEAD else None
    if buffer.before:
        named = (
            each
            for parameters in (declared[segment], *declared.values())
            for each in parameters
            if each.name.startswith(f"{buffer.before}.")
        )
        return next(named), copy
    if buffer.module:
        own = declared[segment]
        position = 1 + max(
            n for n, each in enumerate(own) if each.name.startswith(f"{buffer.module}.")
        )
        if position < len(own):
            return own[position], copy
    elif position < len(segment.parameters):
        return segment.parameters[position], copy
    if segment.parameters and copy + 1 < segment.repeat:
        return declared[segment][0], copy + 1
    later = (declared[each] for each in tape.segments[segment.index + 1 :] if declared.get(each))
    parameters = next(later, None)
    return None if parameters is None else (parameters[0], 0)


def is_trained(parameter: Parameter) -> bool:
    """Whether the optimizer steps it."""
    return parameter.requires_grad and not parameter.unused
