"""The order in which a model's class declares its parameters: that of ``named_parameters()``.

The tape has them in the order in which they run. A class may declare them in another one: norms
last, keys before queries, the final norm before the layers. ``Tape.declared`` says which, segment by
segment; a parameter that it does not name stands behind those of its module, or where it runs.
"""

from collections.abc import Sequence

from memplan.graph.core.overlay import BASE_LAYER, ORIGINAL
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter

Stretch = tuple[Segment, list[Parameter]]
"""Parameters of a segment that stand together, in each of its repetitions."""


def declared_parameters(tape: Tape) -> list[Stretch]:
    """All parameters in the order of ``named_parameters()``, a segment's repetitions side by side."""
    stage = tape.options.stage
    if stage is not None and stage.has_copy and stage.runtime.declares_copies_first:
        *others, head = tape.segments
        return [(segment, registered(segment.parameters)) for segment in (head, *others)]
    if not tape.declared:
        return [(segment, registered(segment.parameters)) for segment in tape.segments]
    stretches: list[Stretch] = []
    left = {segment.index: list(segment.parameters) for segment in tape.segments}
    last = {names[0]: number for number, names in enumerate(tape.declared)}
    for number, (name, *members) in enumerate(tape.declared):
        for segment in tape.segments:
            if segment.name == name:
                own = left[segment.index]
                # What is repeated stands together; what is named nowhere comes with the last.
                everything = segment.num_copies > 1 or last[name] == number
                taken = as_constructed(tape, _ranked(own, members, everything=everything))
                left[segment.index] = [each for each in own if each not in taken]
                stretches.append((segment, taken))
    stretches += [(segment, left[segment.index]) for segment in tape.segments]
    return [stretch for stretch in stretches if stretch[1]]


def as_constructed(tape: Tape, parameters: list[Parameter]) -> list[Parameter]:
    """Those of one layer as its class's constructor comes to them, where it says so of all."""
    if not all(id(each) in tape.places for each in parameters):
        return parameters
    return sorted(parameters, key=lambda each: tape.places[id(each)])


def _ranked(
    parameters: Sequence[Parameter], members: Sequence[str], *, everything: bool
) -> list[Parameter]:
    """Those of these members, in their order; with ``everything`` the others behind them."""
    ranks = {name: number for number, name in enumerate(members)}
    found: list[tuple[int, int, int]] = []
    for position, each in enumerate(parameters):
        rank = _rank(each, ranks)
        if rank is not None:
            found.append((rank, 0, position))
        elif everything:
            found.append((*_beside_neighbour(position, parameters, ranks), position))
    return [parameters[position] for *_, position in sorted(found)]


def _rank(parameter: Parameter, ranks: dict[str, int]) -> int | None:
    """Where a parameter is named, itself or by its module; an adapted one as it was called before."""
    name, module = parameter.name, parameter.module
    for wrapper in (BASE_LAYER, ORIGINAL):
        if module.endswith(wrapper):
            name, module = name.replace(wrapper, ""), module.replace(wrapper, "")
    return ranks.get(name, ranks.get(module))


def _beside_neighbour(
    position: int, parameters: Sequence[Parameter], ranks: dict[str, int]
) -> tuple[int, int]:
    """Before or behind the named parameter whose module's name is most like this one's."""
    best = (-1, len(ranks), 1)
    for number, each in enumerate(parameters):
        rank = _rank(each, ranks)
        if rank is not None:
            likeness = _common_parts(each.module, parameters[position].module)
            if likeness > best[0] or (likeness == best[0] and number < position):
                best = (likeness, rank, 1 if number < position else -1)
    return best[1], best[2]


def _common_parts(left: str, right: str) -> int:
    """How many of the first parts of two modules' names are the same."""
    count = 0
    for one, other in zip(left.split("."), right.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count


def registered(parameters: Sequence[Parameter]) -> list[Parameter]:
    """A layer's parameters as most classes declare them, where nothing else is known.

    transformers' decoder layers with RMSNorm (Llama and all that follow it) declare attention and
    feed-forward network first and their norms last; those with biased norms (GPT-2, BERT) declare
    them where they run. It moves a few thousand elements within a layer, and where a part's
    boundary falls there, a whole parameter's gradient into another rank's part or out of it.
    """
    biased = {each.module for each in parameters if each.name.endswith(".bias")}
    last = [
        each
        for each in parameters
        if "norm" in each.module and "." not in each.module and each.module not in biased
    ]
    if len(last) == len(parameters):
        return list(parameters)
    return [each for each in parameters if each not in last] + last
