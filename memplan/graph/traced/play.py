"""Play a traced program on a tape: each call as the operation that built-in models record for it.

Layers of a list are segments, equal neighbours one with a count. What a layer's variables let go of while
it runs is touched there; what outlives its segment is held until the one that lets it go.
"""

from memplan.errors import MemplanError, TraceError, UnsupportedOperationError
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.traced.layers import Stretch, stretches_of
from memplan.graph.traced.operators import OPERATORS, without_gradient
from memplan.graph.traced.values import Values
from memplan.model.parameters import ModelPart
from memplan.model.spec import ModelSpec
from memplan.model.traced import Program, Step, StepKind, TracedModule
from memplan.training.layer_choice import CheckpointedLayers


def record_traced(model: ModelSpec, module: TracedModule, options: TapeOptions) -> Tape:
    """Write the module's training step on a new tape.

    Raises ``TraceError`` for a program whose steps do not fit together, as a file may hold one.
    """
    t = Tape(options, source=model.source)
    program = module.program(
        options.compute,
        autocasts=options.autocast is not None,
        recomputes=bool(options.checkpointed_layers),
    )
    try:
        Player(t, module, program).play()
    except MemplanError:
        raise
    except _MISFITS as error:
        msg = (
            f"{model.source}: the steps of the traced module do not fit together "
            f"({type(error).__name__}: {error}): trace it anew"
        )
        raise TraceError(msg) from error
    return t


_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What a call does that is given too few tensors, or others than it takes."""


class Player(Values):
    """One program, played on one tape."""

    def __init__(self, t: Tape, module: TracedModule, program: Program) -> None:
        super().__init__(t, module, program)
        self.stretches = stretches_of(program)
        self._read_at: dict[int, int] = {}
        self._made_in: dict[int, int] = {}
        """Of each value the stretch that makes it."""
        self._freed_in: dict[int, int] = {}
        """And the one in which variables let it go."""

    def play(self) -> None:
        """All stretches, one after another."""
        t, program = self.t, self.program
        t.inputs = [
            t.tensor(self.numel(number), self.dtype(number)).storage.num_bytes
            for number, value in enumerate(program.values)
            if value.input
        ]
        stretches = self.stretches
        for index, stretch in enumerate(stretches):
            self._made_in |= dict.fromkeys(stretch.made, index)
            for step in stretch.steps:
                if step.kind is StepKind.FREE:
                    self._freed_in |= dict.fromkeys(step.inputs, index)
        position = 0
        while position < len(stretches):
            stretch = stretches[position]
            count = self._equal_layers(stretches, position)
            self._play_stretch(stretch, count, is_last=position + count == len(stretches))
            # The first layer may stand for itself alone: it gives another format than it is given, or is the
            # first that a gradient reaches.
            count = self.t.segment.repeat
            for later in stretches[position + 1 : position + count]:
                self._alias(stretch, later)
            position += count
        t.release_cache()

    def _equal_layers(self, stretches: list[Stretch], position: int) -> int:
        """How many layers from this one on are alike and treated alike."""
        first = stretches[position]
        count = 1
        if not first.is_layer:
            return count
        chosen = self._is_checkpointed(first)
        while position + count < len(stretches):
            other = stretches[position + count]
            alike = other.is_layer and other.canonical == first.canonical
            if not alike or self._is_checkpointed(other) is not chosen:
                break
            count += 1
        return count

    def _is_checkpointed(self, stretch: Stretch) -> bool:
        layers = self.t.options.checkpointed_layers
        of_list = [each for each in self.stretches if each.list_name == stretch.list_name]
        index = of_list.index(stretch)
        if isinstance(layers, CheckpointedLayers):
            return index in layers
        return index < round(layers * len(of_list))

    def _play_stretch(self, stretch: Stretch, count: int, *, is_last: bool) -> None:
        t = self.t
        given = self.tensors.get(stretch.given) if stretch.given is not None else None
        part = ModelPart.LAYERS if stretch.is_layer else self._part(is_last=is_last)
        t.begin(
            stretch.list_name or self._name_of(is_last=is_last), part=part, repeat=count,
            checkpointed=stretch.is_layer and self._is_checkpointed(stretch), x=given,
        )  # fmt: skip
        self.prefix = stretch.prefix
        for position, step in enumerate(stretch.steps):
            if step.kind is StepKind.CALL:
                self._call(step)
                for number in step.inputs:
                    self._read_at[number] = position
            elif step.kind is StepKind.FREE:
                self._free(step, position)
        out = self.tensors[stretch.out if stretch.out is not None else self.program.loss]
        for number in stretch.outliving:
            tensor = self.tensors.get(number)
            if tensor is not None and tensor.storage.segment == t.segment.index:
                self._outlive(number, tensor, is_output=tensor is out)
        t.end(out)
        if given is not None:
            changes = out.dtype is not given.dtype or out.requires_grad is not given.requires_grad
            if changes:
                t.segment.repeat = 1

    def _outlive(self, number: int, tensor: Tensor, *, is_output: bool) -> None:
        """Hold what another segment's steps let go of; what one hands to the next goes by itself."""
        if is_output and self._goes_next(number):
            return
        if number in self._freed_in:
            self.t.hold(tensor)
        elif number in self.program.outputs:
            self.t.returned.append(tensor)
            self.t.give_out(tensor)
        elif number != self.program.loss:
            self.t.cache(tensor)

    def _goes_next(self, number: int) -> bool:
        """Whether it is let go of in the stretch behind its own."""
        made, freed = self._made_in.get(number), self._freed_in.get(number)
        return made is not None and freed is not None and freed <= made + 1

    def _name_of(self, *, is_last: bool) -> str:
        """Of what is no layer: it is called by where it stands."""
        if is_last:
            return "head"
        before = [each.name for each in self.t.segments if each.part is ModelPart.LAYERS]
        return f"behind {before[-1]}" if before else "embed"

    def _part(self, *, is_last: bool) -> ModelPart:
        if is_last:
            return ModelPart.HEAD
        return ModelPart.NORM if self.t.segments else ModelPart.EMBEDDING

    def _call(self, step: Step) -> None:
        operator = OPERATORS.get(step.name)
        if operator is None and not any(self.tensor(each).requires_grad for each in step.inputs):
            operator = without_gradient
        if operator is None:
            msg = (
                f"{self.t.source}: the module calls {step.name}, of which memplan does not know what it keeps: "
                "say so where memplan is developed, or have it counted as *states fit*"
            )
            raise UnsupportedOperationError(msg)
        made = operator(self, step)
        for number, tensor in zip(step.outputs, made, strict=True):
            self.tensors[number] = tensor

    def _free(self, step: Step, position: int) -> None:
        for number in step.inputs:
            tensor = self.tensors.pop(number, None)
            if tensor is None or isinstance(tensor, Parameter) or tensor.storage.segment < 0:
                continue
            if any(each.storage is tensor.storage for each in self.tensors.values()):
                continue
            if tensor.storage.segment != self.t.segment.index:
                if tensor.storage.held:
                    self.t.release(tensor)
                continue
            if self._read_at.get(number, -1) < position - 1 or len(step.inputs) > 1:
                self.t.touch(tensor)

    def _alias(self, first: Stretch, later: Stretch) -> None:
        """What a later, equal layer makes is what the first one made."""
        for mine, other in zip(first.made, later.made, strict=True):
            if mine in self.tensors:
                self.tensors[other] = self.tensors[mine]
