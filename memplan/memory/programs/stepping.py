"""An optimizer's step, written into a ledger: its rows' scripts (``memplan.training.optimizers``) played."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.graph.operations.reduction import column_sum_scratch
from memplan.memory.account import ComponentKind
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.model.parameters import WeightRole
from memplan.training.optimizers.script import (
    Act,
    ActKind,
    Made,
    Script,
    Stepped,
    TensorRole,
    acts_of,
    nothing,
    one_group,
    state_bytes,
)
from memplan.training.optimizers.table import chosen
from memplan.training.splitting.exchange import ExchangeKind
from memplan.units import round_up

Replace = Callable[[int, ActKind, Block | None], None]
"""Lets the gradient of a tensor of the step go, by its number, or the tensor itself, and takes what
comes in its place."""

NO_TARGETS = "none"
"""``target_modules`` of a model without linear layers: everything is stepped as it is."""
MOVED = "weights where the optimizer has put them"
COUNTER = "a step counter for each tensor"
_STATES, _TEMPORARIES = ComponentKind.OPTIMIZER_STATES, ComponentKind.TEMPORARIES
_PARAMETERS = ComponentKind.PARAMETERS
STATES_LEAVE = "states_leave"
"""FSDP2's option (``memplan.memory.fsdp2.options``)."""
_SCRATCH = "scratch of a mean over rows"


class Stepper:
    """One rank's optimizer."""

    def __init__(self, given: RankInput, ledger: Ledger) -> None:
        setup = given.setup
        self.row, self.options = chosen(setup.optimizer, setup.optimizer_options)
        self.ledger = ledger
        self.device = given.reducing_device
        self.in_backward = setup.optimizer_in_backward or self.row.in_backward
        self.off_gpu_bytes = 0
        """States that are not on the GPU."""
        self.is_made = False
        """States came when the optimizer was made."""
        self.shared: set[str] = set()
        self.comes_and_goes = dict(setup.engine_options).get(STATES_LEAVE) is True
        """States are on the GPU while it steps, and in CPU RAM otherwise."""
        self.visiting: list[Block] = []
        """States that leave again when the step is over."""
        self.renewed: dict[str, deque[Block]] = {}
        """States that each step makes anew, the oldest first."""
        self.takes_gradients = self.row.on_cpu and bool(dict(self.options)["offload_gradients"])
        """Gradients leave the GPU as soon as they are there."""
        self._made_by: dict[int, tuple[Stepped, Sequence[Act]]] = {}
        """What makes the states of each tensor, by the tensor itself."""

    def construct(self, tensors: Sequence[Stepped], *, of: str) -> None:
        """Make the optimizer; most make their states in the first step."""
        self._check_targets(tensors)
        self._check_kernels(tensors)
        if self.row.made is Made.CONSTRUCTION:
            self.is_made = True
            self._make(tensors, of)

    def construct_another(self, tensors: Sequence[Stepped], *, of: str) -> None:
        """Make one over these that is never stepped, and is not let go of."""
        if self.row.made is Made.CONSTRUCTION:
            self._make(tensors, of)

    def _check_targets(self, tensors: Sequence[Stepped]) -> None:
        """Raise ``SetupError`` where the names of what is projected are no layer's.

        A layer of that name that is none to torch is passed over, as in a loop that looks for linear ones.
        """
        targets = str(dict(self.options).get("target_modules", NO_TARGETS))
        script = Script(self.options, first=True)
        if targets == NO_TARGETS or any(self.row.group(script, each) for each in tensors):
            return
        from memplan.training.optimizers.low_rank import is_named  # only where names decide

        if any(each.role is TensorRole.CONV1D and is_named(script, each) for each in tensors):
            return
        linear = (TensorRole.LINEAR, TensorRole.QUERY_KEY, TensorRole.CONV1D)
        names = dict.fromkeys(each.module for each in tensors if each.role in linear)
        msg = (
            f"optimizer_options: target_modules: no linear layer's name has {targets}; "
            f"there are {', '.join(names)}"
        )
        raise SetupError(msg)

    def _check_kernels(self, tensors: Sequence[Stepped]) -> None:
        """Raise ``SetupError`` where a tensor is of a kind that its package cannot step."""
        if self.row.lacks is None:
            return
        script = Script(self.options, first=True)
        for each in tensors:
            if lack := self.row.lacks(script, each):
                msg = f"optimizer: {lack}"
                raise SetupError(msg)

    def step(
        self,
        tensors: Sequence[Stepped],
        *,
        of: str,
        first: bool,
        replace: Replace | None = None,
    ) -> None:
        """One step over these tensors; ``of`` says in words what they are."""
        row = self.row
        first = (first and not self.is_made) or self.comes_and_goes
        if not row.on_cpu:
            self.ledger.exchange(ExchangeKind.UPDATE, self.moved_bytes(tensors))
        if self.comes_and_goes:
            self._bring(tensors)
        names: dict[str, Block] = {}
        for numbers in self._groups(tensors):
            self._step_group([(each, tensors[each]) for each in numbers], names, of, first, replace)
            if row.made is not Made.EACH:  # each group's update is a call of its own
                self.ledger.free_all(reversed(names.values()))
                names.clear()
        self.ledger.free_all(reversed(names.values()))
        self.ledger.free_all(self.visiting)
        self.visiting = []

    def _bring(self, tensors: Sequence[Stepped]) -> None:
        """Count what comes from CPU RAM, and goes back there."""
        self.off_gpu_bytes = sum(state_bytes(self.row, self.options, each) for each in tensors)
        for kind in (ExchangeKind.TO_GPU, ExchangeKind.TO_HOST):
            self.ledger.exchange(kind, self.off_gpu_bytes)

    def _groups(self, tensors: Sequence[Stepped]) -> Iterable[Sequence[int]]:
        """Which tensors are stepped together, by number."""
        if self.row.group is one_group:
            return (range(len(tensors)),)
        script = Script(self.options, first=False)
        found: dict[int, list[int]] = {}
        for number, tensor in enumerate(tensors):
            found.setdefault(self.row.group(script, tensor), []).append(number)
        return [found[group] for group in sorted(found)]

    def _step_group(
        self,
        numbered: Sequence[tuple[int, Stepped]],
        names: dict[str, Block],
        of: str,
        first: bool,
        replace: Replace | None,
    ) -> None:
        """States of a group are made before its first update: the next one's come after its last."""
        row = self.row
        tensors = [tensor for _, tensor in numbered]
        makes_each = first and row.made is Made.EACH
        if first and not makes_each:
            self._make(tensors, of)
            if row.on_cpu:
                self._count_off_gpu(tensors)
        if row.update_all is not None:
            script = Script(self.options, first=first)
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                row.update_all(script, [each for each in tensors if each.dtype is dtype])
            self._play(script.acts, names, "", 0, replace)
        elif makes_each or row.update is not nothing:
            for number, tensor in numbered:
                acts = acts_of(row, self.options, tensor, init=makes_each, update=True, first=first)
                self._play(acts, names, self._line(tensor, of), number, replace)

    def asks(self, tensors: Sequence[Stepped], *, first: bool) -> bool:
        """Whether a step over these requests any block: its first one makes states."""
        row = self.row
        if (first and not self.is_made) or self.comes_and_goes:
            return True
        if row.update_all is not None:
            script = Script(self.options, first=first)
            row.update_all(script, tensors)
            return any(act.num_bytes for act in script.acts)
        each = (
            acts_of(row, self.options, tensor, init=False, update=True, first=first)
            for tensor in dict.fromkeys(tensors)
        )
        return any(act.num_bytes for acts in each for act in acts)

    def moved_bytes(self, tensors: Sequence[Stepped]) -> int:
        """What a step over these reads and writes [bytes]: each gradient once, weights and states both
        ways; of a form that goes over them in many kernels, what all of these do."""
        counts, total = Counter(map(id, tensors)), 0
        for tensor in _each_once(tensors):
            own = tensor.numel * tensor.dtype.num_bytes
            if self.row.passes is None:
                found = 3 * own + 2 * state_bytes(self.row, self.options, tensor)
            else:
                found = self.row.passes * own
            total += counts[id(tensor)] * found
        return total

    def takes_gradient(self, tensor: Stepped) -> bool:
        """Whether this one's does."""
        return any(act.kind is ActKind.HOST for act in self._states_script(tensor))

    def _line(self, tensor: Stepped, of: str) -> str:
        return f"{self.row.words.format(dtype=tensor.dtype.label)} of {of}"

    def _make(self, tensors: Sequence[Stepped], of: str) -> None:
        """All states at once; copies of a layer are stepped as one object."""
        if any(map(self._passes_through, _each_once(tensors))):
            self._make_in_turn(tensors, of)
            return
        sizes: list[tuple[int, object]] = []
        known: dict[int, list[tuple[int, object]]] = {}
        for tensor in tensors:
            found = known.get(id(tensor))
            if found is None:
                found = known[id(tensor)] = self._states(tensor, of)
            sizes += found
        self._keep(self.ledger.allocate_all(sizes, _STATES))

    def _keep(self, states: list[Block]) -> None:
        """Hold states until the run is over, or until the step is where they come and go."""
        if self.comes_and_goes:
            self.visiting += states

    def _states_script(self, tensor: Stepped) -> Sequence[Act]:
        found = self._made_by.get(id(tensor))
        if found is None:
            acts = acts_of(self.row, self.options, tensor, init=True, update=False, first=True)
            found = self._made_by[id(tensor)] = tensor, acts
        return found[1]

    def _passes_through(self, tensor: Stepped) -> bool:
        """Whether what comes on the way to its states goes again."""
        return any(act.kind is ActKind.LET for act in self._states_script(tensor))

    def _make_in_turn(self, tensors: Sequence[Stepped], of: str) -> None:
        """The states of one tensor after another's."""
        names: dict[str, Block] = {}
        for number, tensor in enumerate(tensors):
            line = self._line(tensor, of)
            self._play(self._states_script(tensor), names, line, number, None)
        self.ledger.free_all(reversed(names.values()))

    def _states(self, tensor: Stepped, of: str) -> list[tuple[int, object]]:
        """Blocks of one tensor's states, each with its line."""
        line, found = self._line(tensor, of), list[tuple[int, object]]()
        for act in self._states_script(tensor):
            if act.kind is ActKind.COUNTER:
                found.append((ALLOCATION_ROUNDING, COUNTER))
            elif act.kind is ActKind.STATE and act.num_bytes:
                found.append((round_up(act.num_bytes, ALLOCATION_ROUNDING), line))
        return found

    def _count_off_gpu(self, tensors: Sequence[Stepped]) -> None:
        """States that live elsewhere, where they are all made at once."""
        for tensor in tensors:
            places = (ActKind.MANAGED, ActKind.HOST)
            self.off_gpu_bytes += sum(
                act.num_bytes for act in self._states_script(tensor) if act.kind in places
            )

    def _is_there(self, act: Act) -> bool:
        """Whether a state that all tensors share came before; from now on it has."""
        if act.kind is not ActKind.SHARED:
            return False
        found = act.name in self.shared
        self.shared.add(act.name)
        return found

    def _play(
        self,
        acts: Sequence[Act],
        names: dict[str, Block],
        line: str,
        number: int,
        replace: Replace | None,
    ) -> None:
        for act in acts:
            kind = act.kind
            if kind in (ActKind.LET, ActKind.LET_WEIGHT):
                self._let(act, names)
            elif kind is ActKind.DROP:
                self._drop(names.pop(act.name, None))
            elif kind is ActKind.RENAME:
                name, _, new = act.name.partition(">")
                old = names.pop(new, None)
                if name in names:
                    names[new] = names.pop(name)
                self._drop(old)
            elif kind in (ActKind.GRADIENT, ActKind.WEIGHT):
                block = names.pop(act.name, None)
                if replace is not None:
                    replace(number, kind, block)
                else:
                    self._drop(block)
            elif kind is ActKind.COLUMN_MEAN:
                self._reduce(act)
            elif kind is ActKind.LAPSED:
                self._drop(self.renewed[act.name].popleft())
            elif kind in (ActKind.MANAGED, ActKind.HOST):
                self.off_gpu_bytes += act.num_bytes
            elif act.num_bytes and not self._is_there(act):
                size = round_up(act.num_bytes, ALLOCATION_ROUNDING)
                counts = kind is ActKind.COUNTER
                block = self.ledger.allocate(size, 0, _STATES, COUNTER if counts else line)
                if kind is not ActKind.SHARED:  # which is made once
                    self._keep([block])
                if kind is ActKind.RENEWED:
                    self.renewed.setdefault(act.name, deque()).append(block)

    def _let(self, act: Act, names: dict[str, Block]) -> None:
        """Give a tensor a name; what had it goes once the new one is there."""
        old = names.pop(act.name, None)
        if act.num_bytes:
            size = round_up(act.num_bytes, ALLOCATION_ROUNDING)
            stays = act.kind is ActKind.LET_WEIGHT
            component, words = (
                (_PARAMETERS, MOVED) if stays else (_TEMPORARIES, self.row.temporaries)
            )
            names[act.name] = self.ledger.allocate(size, 0, component, words)
        self._drop(old)

    def _drop(self, block: Block | None) -> None:
        if block is not None:
            self.ledger.free(block)

    def _reduce(self, act: Act) -> None:
        """What a mean over rows needs inside its kernel."""
        if self.device is None:
            return
        launches = column_sum_scratch(act.num_columns, act.num_rows, act.num_bytes, self.device)
        for blocks in launches:
            self.ledger.use(*blocks, kind=ComponentKind.KERNEL_SCRATCH, name=_SCRATCH)


def stepped(
    parameter: Parameter, shape: tuple[int, ...] | None = None, dtype: DType | None = None
) -> Stepped:
    """A parameter, or a rank's rows of it, as an optimizer sees it."""
    whole = () if shape is None or len(parameter.shape) < 2 else parameter.shape
    return Stepped(
        parameter.shape if shape is None else shape,
        parameter.dtype if dtype is None else dtype,
        role_of(parameter),
        parameter.module,
        whole,
    )


_ROLES = {
    WeightRole.OUTPUT: TensorRole.HEAD,
    WeightRole.TOKEN_TABLE: TensorRole.EMBEDDING,
    WeightRole.TABLE: TensorRole.EMBEDDING,
    WeightRole.QUERY_KEY: TensorRole.QUERY_KEY,
}


def role_of(parameter: Parameter) -> TensorRole:
    """What a parameter is to an optimizer, by its role in its module."""
    if len(parameter.shape) != 2:
        return TensorRole.OTHER
    if parameter.in_conv1d:
        return TensorRole.CONV1D
    return _ROLES.get(parameter.role, TensorRole.LINEAR)


def _each_once(tensors: Sequence[Stepped]) -> Iterable[Stepped]:
    """Copies of a layer are stepped as one object, which is told apart by itself: to compare tensors takes longer."""
    return {id(tensor): tensor for tensor in tensors}.values()


def stepped_all(parameters: Iterable[Parameter]) -> list[Stepped]:
    """The same for the parameters of all copies of a layer, which are one object."""
    known: dict[Parameter, Stepped] = {}
    found = []
    for parameter in parameters:
        tensor = known.get(parameter)
        if tensor is None:
            tensor = known[parameter] = stepped(parameter)
        found.append(tensor)
    return found
