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


class Format(StrEnum):
    """What a tensor's numbers are, where the program does not fix it."""

    MODEL = "model"
    """The module's own floating-point format."""
    FP32 = "fp32"
    INT64 = "int64"
    INT32 = "int32"
    BOOL = "bool"

    def dtype(self, own: DType) -> DType:
        """The format in a module whose own is ``own``."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedModule:
    """Everything that was seen of a module."""

    class_name: str
    torch_version: str
    parameters: tuple[TracedParameter, ...]
    """In the order of ``named_parameters``, shared ones once."""
    programs: tuple[tuple[str, Program], ...]
    """By the module's own format, ``full`` or ``half``: modules look at it."""
    symbols: tuple[str, ...] = SYMBOLS

    def program(self, own: DType) -> Program:
        """How it runs in a format."""
        programs = dict(self.programs)
        return programs["half" if own.is_half else "full"]
