"""A step of an optimizer as the allocator sees it: a short script for each tensor that it steps.

An optimizer is an ``OptimizerRow``. ``init`` writes down the states of one tensor in the order in which
they are made, ``update`` what one tensor's update makes and lets go (or ``update_all``, for all tensors
at once, as torch's foreach forms do). Both are written as the optimizer's own ``step()`` reads:
``let`` binds a local variable, which lets go of what it held before, and so what the tensor before left
there is alive until then, as it is in Python.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum, auto
from functools import lru_cache
from math import prod

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass, field

Shape = tuple[int, ...]
OptionValue = bool | int | float | str
Options = tuple[tuple[str, OptionValue], ...]
"""An optimizer's own settings, every one of them, sorted by name."""


class TensorRole(Enum):
    """What a stepped tensor is to an optimizer that treats some otherwise."""

    LINEAR = "linear"
    """The matrix of a linear layer."""
    EMBEDDING = "embedding"
    HEAD = "head"
    """The output matrix, where it is not the embedding."""
    QUERY_KEY = "query-key"
    """The matrix of a linear layer that makes queries or keys."""
    CONV1D = "conv1d"
    """The matrix of a module that does as a linear layer does and is none (GPT-2)."""
    OTHER = "other"
    """Norms, biases, stacked experts; and any flat shard."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A tensor that is handed to an optimizer, as far as it makes a difference there."""

    shape: Shape
    dtype: DType
    role: TensorRole = TensorRole.OTHER
    module: str = ""
    """The module that owns it; empty where no optimizer asks."""
    whole: Shape = ()
    """The shape of the matrix that it is a rank's rows of, where ranks hand parts about; else empty."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def is_factored(self) -> bool:
        """Whether it has rows and columns."""
        return len(self.shape) > 1

    @property
    def num_rows(self) -> int:
        """Of a mean over the last dimension: its elements.

        >>> Stepped((8, 64, 32), DType.FP32).num_rows, Stepped((8, 64, 32), DType.FP32).num_columns
        (512, 256)
        """
        return prod(self.shape[:-1])

    @property
    def num_columns(self) -> int:
        """Of a mean over the last dimension but one: its elements."""
        return prod(self.shape[:-2]) * self.shape[-1]


class Place(Enum):
    """Where a state lives."""

    GPU = "gpu"
    MANAGED = "managed"
    """CUDA's managed memory: it comes to the GPU page by page and is not torch's; counted as CPU RAM,
    where all of it must have room."""
    HOST = "host"
    """Page-locked CPU RAM."""


class ActKind(IntEnum):
    """What a script asks for."""

    STATE = auto()
    """A block that stays."""
    COUNTER = auto()
    """The same, a scalar that counts steps."""
    SHARED = auto()
    """The same, once for all tensors."""
    LET = auto()
    """A block bound to a name; what was bound to it before goes."""
    DROP = auto()
    """What is bound to a name goes."""
    COLUMN_MEAN = auto()
    """Scratch of a sum over rows; ``num_bytes`` are the input's."""
    GRADIENT = auto()
    """The gradient goes; what the name holds, if there is a name, takes its place."""
    RENAME = auto()
    """``old>new``: what one name holds is another's from now on."""
    WEIGHT = auto()
    """The same of the weight itself."""
    LET_WEIGHT = auto()
    """A block bound to a name that will be the weight's."""
    MANAGED = auto()
    HOST = auto()
    RENEWED = auto()
    """A state that is another block after each step."""
    LAPSED = auto()
    """The oldest of these that has this name goes: the block that it was."""


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that a script asks for."""

    kind: ActKind
    name: str
    num_bytes: int = 0
    num_columns: int = 0
    num_rows: int = 0


_STATE_ACTS = {Place.GPU: ActKind.STATE, Place.MANAGED: ActKind.MANAGED, Place.HOST: ActKind.HOST}
_STAYS = frozenset({
    ActKind.STATE, ActKind.COUNTER, ActKind.SHARED, ActKind.MANAGED, ActKind.HOST, ActKind.RENEWED,
})  # fmt: skip


class Script:
    """What is written down."""

    __slots__ = ("acts", "first", "options")

    def __init__(self, options: Options, *, first: bool) -> None:
        self.acts: list[Act] = []
        self.options = dict(options)
        self.first = first
        """States are made in this step."""

    def number(self, name: str) -> int:
        """An option that is a whole number."""
        value = self.options[name]
        assert isinstance(value, int)
        return value

    def flag(self, name: str) -> bool:
        """An option that is on or off, or a number that is not 0."""
        return bool(self.options[name])

    def text(self, name: str) -> str:
        """An option in words."""
        return str(self.options[name])

    def state(self, name: str, numel: int, dtype: DType, *, place: Place = Place.GPU) -> None:
        """A state of so many elements."""
        self.acts.append(Act(_STATE_ACTS[place], name, numel * dtype.num_bytes))

    def renew(self, name: str, numel: int, dtype: DType) -> None:
        """A state that each step binds to another tensor, tensor after tensor in one order."""
        self.acts.append(Act(ActKind.RENEWED, name, numel * dtype.num_bytes))
        if not self.first:
            self.acts.append(Act(ActKind.LAPSED, name))

    def counter(self) -> None:
        """``step``, an fp32 scalar on the GPU."""
        self.acts.append(Act(ActKind.COUNTER, "step", DType.FP32.num_bytes))

    def shared(self, name: str, numel: int, dtype: DType) -> None:
        """A state that all tensors share: it comes with the first that needs it."""
        self.acts.append(Act(ActKind.SHARED, name, numel * dtype.num_bytes))

    def let(self, name: str, numel: int, dtype: DType) -> None:
        """A local variable's new value, made while the old one is there."""
        self.acts.append(Act(ActKind.LET, name, numel * dtype.num_bytes))

    def let_weight(self, name: str, numel: int, dtype: DType) -> None:
        """The same of what will take the weight's place."""
        self.acts.append(Act(ActKind.LET_WEIGHT, name, numel * dtype.num_bytes))

    def drop(self, *names: str) -> None:
        """Let go of what these hold, if they hold anything."""
        self.acts.extend(Act(ActKind.DROP, name) for name in names)

    def column_mean(self, tensor: Stepped, dtype: DType) -> None:
        """What a mean over the rows of a matrix in this format needs inside its kernel."""
        if len(tensor.shape) == 2:
            rows, columns = tensor.shape
            size = tensor.numel * dtype.num_bytes
            self.acts.append(Act(ActKind.COLUMN_MEAN, "", size, columns, rows))

    def rename(self, name: str, new: str) -> None:
        """A value gets another name; what that held before goes."""
        self.acts.append(Act(ActKind.RENAME, f"{name}>{new}"))

    def replace_gradient(self, name: str) -> None:
        """What a name holds is the tensor's gradient from now on."""
        self.acts.append(Act(ActKind.GRADIENT, name))

    def replace_weight(self, name: str) -> None:
        """What a name holds is the tensor itself from now on."""
        self.acts.append(Act(ActKind.WEIGHT, name))

    def free_gradient(self) -> None:
        """The tensor's gradient goes."""
        self.acts.append(Act(ActKind.GRADIENT, ""))


Writer = Callable[[Script, Stepped], None]
"""Writes down what one tensor takes."""


def nothing(script: Script, tensor: Stepped) -> None:
    """No states, or an update in place."""
    del script, tensor


class Made(Enum):
    """When states are made."""

    FIRST = "all in the first step, before the first update"
    EACH = "in the first step, each tensor's before its own update"
    CONSTRUCTION = "when the optimizer is made"


def one_group(script: Script, tensor: Stepped) -> int:
    """All tensors in the order of the model."""
    del script, tensor
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRow:
    """One optimizer."""

    init: Writer = nothing
    """The states of one tensor."""
    update: Writer = nothing
    """The update of one tensor."""
    update_all: Callable[[Script, Sequence[Stepped]], None] | None = None
    """The update of all tensors at once, in place of ``update``."""
    made: Made = Made.FIRST
    group: Callable[[Script, Stepped], int] = one_group
    """Tensors are stepped group by group: which this one is in."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Its own settings and their defaults."""
    words: str = "2 x {dtype}"
    """Its states, for people; ``{dtype}`` is the stepped tensors'."""
    temporaries: str = "what the optimizer's step makes and lets go"
    """What its step makes besides, for people."""
    source: str
    """Package, version and file."""
    passes: int | None = None
    """How often a step reads or writes as many bytes as there are weights, where it goes over them kernel
    after kernel; None: each gradient is read once, weights and states are read and written once."""
    in_backward: bool = False
    """It steps in backward, and no other way."""
    lags: bool = False
    """It then steps a gradient only when the next one is there."""
    needs_matrices: bool = False
    """It does something else with a flat shard than with the matrix that it is cut from."""
    single_gpu: bool = False
    """It is made for one GPU."""
    on_cpu: bool = False
    """Gradients go to the CPU as they come, and the step is there."""
    zero_offload: bool = False
    """DeepSpeed has a form of it for the CPU."""
    lacks: Callable[[Script, Stepped], str] | None = None
    """What it cannot do with a tensor, in words; empty where it can."""
    least_capability: tuple[int, int] = (0, 0)
    """Compute capability from which on its step is one compiled kernel."""
    any_device: bool = False
    """Its step is PyTorch's own operators, which run where the parameters lie: FSDP's offloaded shards on the CPU."""


def acts_of(
    row: OptimizerRow, options: Options, tensor: Stepped, *, init: bool, update: bool, first: bool
) -> tuple[Act, ...]:
    """The script of one tensor: of its states, of its update, or of both."""
    return _acts_of(_Same(row), options, tensor, init, update, first)


class _Same:
    """A row, told apart by itself."""

    __slots__ = ("row",)

    def __init__(self, row: OptimizerRow) -> None:
        self.row = row

    def __hash__(self) -> int:
        return id(self.row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.row is self.row


@lru_cache(maxsize=4096)
def _acts_of(
    same: _Same, options: Options, tensor: Stepped, init: bool, update: bool, first: bool
) -> tuple[Act, ...]:
    script = Script(options, first=first)
    if init:
        same.row.init(script, tensor)
    if update:
        same.row.update(script, tensor)
    return tuple(script.acts)


def states_of(row: OptimizerRow, options: Options, tensor: Stepped) -> list[Act]:
    """What an optimizer keeps of one tensor between steps, wherever it is.

    >>> from memplan.training.optimizers.table import row_of
    >>> from memplan.training.optimizers import Optimizer
    >>> row = row_of(Optimizer.ADAFACTOR)
    >>> options = options_of(row, {}, "adafactor")
    >>> [(act.name, act.num_bytes) for act in states_of(row, options, Stepped((64, 32), DType.BF16))]
    [('exp_avg_sq_row', 256), ('exp_avg_sq_col', 128), ('RMS', 4)]
    """
    acts = acts_of(row, options, tensor, init=True, update=row.update_all is None, first=True)
    return [act for act in acts if act.kind in _STAYS]


def state_bytes(row: OptimizerRow, options: Options, tensor: Stepped) -> int:
    """The same in bytes, what is the same for all tensors and step counters left out [bytes]."""
    apart = (ActKind.SHARED, ActKind.COUNTER)
    return sum(act.num_bytes for act in states_of(row, options, tensor) if act.kind not in apart)


def options_of(row: OptimizerRow, given: Mapping[str, object], name: str) -> Options:
    """An optimizer's settings with those given filled in.

    Raises ``SetupError`` for one that it does not have, or a value of another kind.
    """
    found: dict[str, OptionValue] = dict(row.options)
    for key, value in given.items():
        if key not in found:
            known = list(found)
            has = f"it has {', '.join(known)}" if known else "it has none that moves memory"
            msg = (
                f"optimizer_options: {name} has no option {key!r};{did_you_mean(key, known)} {has}"
            )
            raise SetupError(msg)
        found[key] = _checked(key, value, found[key])
    return tuple(sorted(found.items()))


def _checked(key: str, value: object, default: OptionValue) -> OptionValue:
    """A value of the default's kind."""
    if isinstance(value, tuple):
        value = ",".join(str(each) for each in value)
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NUMBER:
            return value
        wanted = f"a whole number from 1 to {MAX_NUMBER}"
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return float(value)
        wanted = "a number from 0 up"
    else:
        if isinstance(value, str):
            return value
        wanted = "text"
    msg = f"optimizer_options: {key}: write {wanted}, not {value!r}"
    raise SetupError(msg)


MAX_NUMBER = 2**31
