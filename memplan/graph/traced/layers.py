"""A program's stretches: what stands before, between and behind the layers, and each layer."""

from functools import lru_cache

from memplan.fast_dataclass import dataclass
from memplan.model.traced import Program, Step, StepKind


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Steps that are one segment of the tape."""

    steps: tuple[Step, ...]
    list_name: str
    """Of a layer the list that it hangs in; empty: none."""
    prefix: str
    """Of a layer its module's name."""
    given: int | None
    """What it reads of the stretch before."""
    out: int | None
    """What it hands on; None: the loss."""
    made: tuple[int, ...]
    """Values that it makes, in order."""
    outliving: tuple[int, ...]
    """Those that its steps do not let go of."""
    canonical: tuple[object, ...]
    """Equal where two layers do the same."""

    @property
    def is_layer(self) -> bool:
        """Whether it is a member of a list of layers."""
        return bool(self.list_name)


@lru_cache(maxsize=8)
def stretches_of(program: Program) -> list[Stretch]:
    """Cut a program at the borders of its layers; a border that stands in another's layer is none."""
    cuts: list[tuple[list[Step], str, int | None, int | None]] = []
    steps: list[Step] = []
    name, given = "", None
    for step in program.steps:
        if step.kind is StepKind.BEGIN:
            following = step.inputs[0] if step.inputs else None
            cuts.append((steps, name, given, following))
            steps, name, given = [], step.name, following
        elif step.kind is StepKind.END:
            out = step.inputs[0]
            cuts.append((steps, name, given, out))
            steps, name, given = [], "", out
        else:
            steps.append(step)
    cuts.append((steps, name, given, None))
    # Between two layers of a list nothing is computed: what is let go there belongs to the first.
    joined: list[tuple[list[Step], str, int | None, int | None]] = []
    for cut in cuts:
        is_idle = not cut[1] and all(step.kind is StepKind.FREE for step in cut[0])
        if is_idle and joined and joined[-1][1]:
            joined[-1][0].extend(cut[0])
        else:
            joined.append(cut)
    parts = [part for cut in joined for part in _where_others_end(*cut)]
    return [_stretch(program, *part) for part in parts]


def _where_others_end(
    steps: list[Step], name: str, given: int | None, out: int | None
) -> list[tuple[list[Step], str, int | None, int | None]]:
    """Cut what is no layer where an inner module returns, and lets go of what others made."""
    made: set[int] = set()
    last = None
    for position, step in enumerate(steps):
        if step.kind is StepKind.CALL:
            made.update(step.outputs)
            last = step.outputs[0]
        elif step.kind is StepKind.FREE and not name and given is not None and last is not None:
            rest = steps[position + 1 :]
            ends_others = any(number not in made and number != given for number in step.inputs)
            if ends_others and any(each.kind is StepKind.CALL for each in rest):
                head = (steps[: position + 1], name, given, last)
                return [head, *_where_others_end(rest, name, last, out)]
    return [(steps, name, given, out)]


def _stretch(
    program: Program,
    steps: list[Step],
    name: str,
    given: int | None,
    out: int | None,
) -> Stretch:
    made = tuple(number for step in steps for number in step.outputs if number not in step.inputs)
    freed = {number for step in steps if step.kind is StepKind.FREE for number in step.inputs}
    places = {number: place for place, number in enumerate(made)}

    def word(number: int) -> object:
        value = program.values[number]
        if number == given:
            return "given"
        if number in places:
            return places[number], value.shape, value.format, value.strided
        if value.parameter:
            return value.parameter.removeprefix(name), value.shape
        return number

    def said(step: Step) -> object:
        if step.kind is StepKind.FREE:
            # What an earlier layer left is another's matter.
            own = tuple(word(number) for number in step.inputs if number in places)
            return (step.kind, own) if own else None
        taken, given_back = tuple(map(word, step.inputs)), tuple(map(word, step.outputs))
        return step.name, taken, given_back, step.settings

    canonical = [words for words in map(said, steps) if words is not None]
    return Stretch(
        tuple(steps),
        list_name=name.rpartition(".")[0],
        prefix=name,
        given=given,
        out=out,
        made=tuple(dict.fromkeys(made)),
        outliving=tuple(number for number in dict.fromkeys(made) if number not in freed),
        canonical=tuple(canonical),
    )
