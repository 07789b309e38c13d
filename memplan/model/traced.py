"""A user's own module as data: what it called, on tensors whose sizes hang on the batch and the sequence.

``memplan.trace`` writes one down from a ``torch.nn.Module``; ``memplan.graph.traced`` plays it on a tape. A
program says what the module asked of torch (``linear``, ``softmax``, ``cat``), not what torch kept: that is
the tape's own knowledge, the same as for built-in models, so that precision, kernels and checkpointing are
chosen when it is played.
"""

from enum import StrEnum

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass

SYMBOLS = ("batch_size", "seq_len", "target_seq_len")
"""What sizes hang on, in the order in which ``Size`` has their powers."""


@dataclass(frozen=True, slots=True)
class Size:
    """A sum of terms, each a number times some of the symbols."""

    terms: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Numerator, denominator and the power of each symbol."""

    def at(self, symbols: tuple[int, ...]) -> int:
        """The size for a batch and its lengths.

        >>> Size(((2, 1, (1, 1, 0)), (-1, 1, (1, 0, 0)))).at((4, 128, 0))
        1020
        """
        total = 0
        for numerator, denominator, powers in self.terms:
            product = numerator
            for symbol, power in zip(symbols, powers, strict=True):
                product *= symbol**power
            total += product // denominator
        return total


FULL, HALF, AUTOCAST = "full", "half", "autocast"
"""Programs of a module in fp32, in 16 bits, and in fp32 under autocast."""
RECOMPUTED = "recomputed"
"""Of a program that runs as with checkpointing, which modules look at too."""


class Format(StrEnum):
    """What a tensor's numbers are, where the program does not fix it."""

    MODEL = "model"
    """The module's own floating-point format."""
    HALF = "half"
    """Autocast's 16 bits."""
    FP32 = "fp32"
    INT64 = "int64"
    INT32 = "int32"
    BOOL = "bool"

    def dtype(self, own: DType, half: DType | None = None) -> DType:
        """The format in a module whose own is ``own``, under autocast to ``half``."""
        if self is Format.HALF:
            return half or DType.BF16
        return own if self is Format.MODEL else DType[self.name]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program."""

    shape: tuple[int, ...]
    """Each dimension's place in ``Program.sizes``."""
    format: Format
    storage: int
    """Views of one storage have the same number."""
    strided: bool
    """Its elements do not lie in the order of its dimensions."""
    parameter: str = ""
    """Its name in the module, where it is a parameter."""
    input: str = ""
    """The argument that it is, where it is one."""


class StepKind(StrEnum):
    """What a step of a program is."""

    CALL = "call"
    FREE = "free"
    BEGIN = "begin"
    """A layer of a list of layers is called."""
    END = "end"


@dataclass(frozen=True, slots=True)
class Step:
    """A call, tensors that variables let go of, or the border of a layer."""

    kind: StepKind
    name: str = ""
    """Of a call torch's name for it; of a border the module's."""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()
    """Arguments that are no tensors."""

    def setting(self, name: str, default: object = None) -> object:
        """One of them."""
        return next((value for key, value in self.settings if key == name), default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One run of the module."""

    sizes: tuple[Size, ...]
    values: tuple[Value, ...]
    steps: tuple[Step, ...]
    loss: int
    """The value that backward begins at."""
    outputs: tuple[int, ...] = ()
    """What the module returned beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedParameter:
    """A parameter of the module."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    is_output: bool = False
    """It is the output matrix, which adapters of all linear layers leave alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedModule:
    """Everything that was seen of a module."""

    class_name: str
    torch_version: str
    example: tuple[int, ...]
    """Batch and lengths of the example, by ``SYMBOLS``; 0 for one that it has not."""
    guesses: tuple[str, ...] = ()
    """Calls whose values the module looked at: nobody knows them without data."""
    parameters: tuple[TracedParameter, ...]
    """In the order of ``named_parameters``, shared ones once."""
    programs: tuple[tuple[str, Program], ...]
    """By the formats and whether it recomputes, since modules look at both."""

    @property
    def num_layers(self) -> int:
        """Members of its lists of layers."""
        _, program = self.programs[0]
        return sum(step.kind is StepKind.BEGIN for step in program.steps)

    def program(self, own: DType, *, autocasts: bool, recomputes: bool) -> Program:
        """How it runs in a format, under autocast or not, with checkpointing or without."""
        programs = dict(self.programs)
        name = HALF if own.is_half else AUTOCAST if autocasts else FULL
        recomputed = programs.get(f"{name}, {RECOMPUTED}")
        return recomputed if recomputes and recomputed is not None else programs[name]
