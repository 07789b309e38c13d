"""What any operator keeps: a row of the table that traced modules are played by, on tensors of one size.

The table says what each of torch's functions records, and the tape what that keeps; nothing is written
here a second time.
"""

from collections.abc import Sequence
from functools import partial

from memplan.dtypes import DType
from memplan.errors import MemplanError
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.traced.operators import OPERATORS
from memplan.graph.traced.values import Values
from memplan.model.traced import Format, Program, Size, Step, StepKind, TracedModule, Value
from memplan.report.lessons.teaching import Lesson, Sizes, Taught, Variant, hidden_states, teach
from memplan.report.lessons.teaching import given as given_before
from memplan.report.lessons.written import LESSONS

_MASKS = {"masked_fill": 1, "where": 0}
"""Which of a function's tensors is a mask."""
MOST_OPERANDS = 3
"""Tensors that a function is tried with."""
_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def operator_names() -> tuple[str, ...]:
    """Every function of the table, by its last name."""
    return tuple(dict.fromkeys(_short(name) for name in OPERATORS))


def _short(name: str) -> str:
    return name.rpartition(".")[2].strip("_")


def operator_lesson(name: str) -> Lesson | None:
    """What a function of this name keeps; None where the table has none, or asks for more than tensors."""
    wanted = name.removeprefix("torch.").rpartition(".")[2].strip("_").lower()
    for known in OPERATORS:
        if _short(known) == wanted:
            lesson = _lesson_of(known)
            if lesson is not None:
                return lesson
    return None


def operator_lessons() -> list[Lesson]:
    """Of every function of the table, each once: the lesson that it has, or its row."""
    own = {each.name: replace(each, variants=each.variants[:1]) for each in LESSONS}
    found: dict[str, Lesson] = {}
    for name in OPERATORS:
        if _short(name) not in found:
            lesson = own.get(_short(name)) or _lesson_of(name)
            if lesson is not None:
                found[_short(name)] = lesson
    return list(found.values())


def _lesson_of(name: str) -> Lesson | None:
    variants = tuple(
        Variant(name=_words(name, count), record=partial(_record, name, count))
        for count in range(1, MOST_OPERANDS + 1)
        if _takes(name, count)
    )
    if not variants:
        return None
    return Lesson(
        name=_short(name),
        title=name,
        why="This is its row of the table by which traced modules are played.",
        source="torch 2.13, tools/autograd/derivatives.yaml",
        variants=variants,
    )


def _words(name: str, count: int) -> str:
    return f"{name}, {count} tensor{'s' * (count > 1)}"


def _takes(name: str, count: int) -> bool:
    """Whether a function takes so many tensors, and gives one that has a gradient."""
    tape = Tape(TapeOptions(batch_size=1, seq_len=_SMALL.tokens))
    tape.begin(name)
    try:
        out = _record(name, count, tape, _SMALL)
        teach(Variant(name=name, record=partial(_record, name, count)), _SMALL)
    except (MemplanError, *_MISFITS):
        return False
    calls = [each for each in tape.segment.operations if each.kind is not OperationKind.GIVEN]
    # Without gradients the table records what makes masks and positions, which need none.
    has_gradients = out.requires_grad and all(each.gradients for each in calls)
    return has_gradients and any(len(each.inputs) == count for each in calls)


_SMALL = Sizes(batch=1, tokens=8, hidden=8)


class _Call(Values):
    """One call, on tensors that were there before."""

    def __init__(self, t: Tape, program: Program, given: Sequence[Tensor]) -> None:
        module = TracedModule(
            class_name="",
            torch_version="",
            example=(1, 1, 1),
            guesses=(),
            parameters=(),
            programs=(),
        )
        super().__init__(t, module, program)
        self.tensors = dict(enumerate(given))


def _record(name: str, count: int, t: Tape, sizes: Sizes) -> Tensor:
    """The function, called with so many tensors."""
    mask = _MASKS.get(_short(name))
    given = [
        hidden_states(t, sizes)
        if number != mask
        else given_before(t, sizes.hidden_numel, DType.BOOL, requires_grad=False)
        for number in range(count)
    ]
    dimensions = (sizes.batch, sizes.tokens, sizes.hidden)
    places = tuple(range(len(dimensions)))
    step = Step(StepKind.CALL, name, tuple(range(count)), (count,))
    program = Program(
        sizes=tuple(Size(((each, 1, (0, 0, 0)),)) for each in dimensions),
        values=tuple(
            Value(places, Format.MODEL, number, strided=False) for number in range(count + 1)
        ),
        steps=(step,),
        loss=count,
    )
    return OPERATORS[name](_Call(t, program, given), step)[0]


def saved_words(taught: Taught) -> str:
    """What a function keeps, in a few words."""
    words = [what for step in taught.steps for what, _ in step.saves]
    return ", ".join(dict.fromkeys(words)) or "nothing"
