"""What a program's tensors are on a tape: sizes for a batch, formats for a precision, declared weights."""

from memplan.dtypes import DType
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.model.parameters import WeightRole
from memplan.model.traced import Program, TracedModule, Value


class Values:
    """One program's tensors on one tape."""

    def __init__(self, t: Tape, module: TracedModule, program: Program) -> None:
        self.t = t
        self.module = module
        self.program = program
        options = t.options
        self._symbols = (options.batch_size, options.seq_len, options.target_seq_len)
        self.sizes = [size.at(self._symbols) for size in program.sizes]
        self.tensors: dict[int, Tensor] = {}
        """Values that are alive."""
        self.parameters: dict[str, Parameter] = {}
        self.prefix = ""
        self._known = {each.name: each for each in module.parameters}
        self._input_storages = {each.storage for each in program.values if each.input}
        sliced = {
            step.inputs[0]
            for step in program.steps
            if step.name == "torch.Tensor.__getitem__" and len(step.inputs) == 1
        }
        self._from_nothing = {
            number for step in program.steps if not step.inputs for number in step.outputs
        }
        self._sliced_behind = _views_before(program, sliced)

    def value(self, number: int) -> Value:
        """A tensor as the program has it."""
        return self.program.values[number]

    def shape(self, number: int) -> tuple[int, ...]:
        """Its dimensions for this batch."""
        return tuple(self.sizes[place] for place in self.value(number).shape)

    def numel(self, number: int) -> int:
        """Its elements."""
        product = 1
        for size in self.shape(number):
            product *= size
        return product

    def dtype(self, number: int) -> DType:
        """Its format, in a module of the options' own."""
        return self.value(number).format.dtype(self.t.options.compute, self.t.options.autocast)

    def is_sliced_behind(self, number: int) -> bool:
        """Whether parts of a view of another order are read: their gradients lie in its order."""
        return number in self._sliced_behind

    def shares_storage(self, one: int, other: int) -> bool:
        """Whether one is a view of the other, or they are of one tensor."""
        return self.value(one).storage == self.value(other).storage

    def makes_itself(self, number: int) -> bool:
        """Whether no parameter and no argument is behind it: zeros, a table."""
        return number in self._from_nothing

    def is_of_inputs(self, number: int) -> bool:
        """Whether it is an argument, or a view of one."""
        return self.value(number).storage in self._input_storages

    def tensor(self, number: int) -> Tensor:
        """The tensor itself: a parameter is declared where it is first read."""
        found = self.tensors.get(number)
        if found is not None:
            return found
        value = self.value(number)
        if value.parameter:
            return self.parameter(
                number, WeightRole.NORM if len(value.shape) < 2 else WeightRole.MATRIX
            )
        # The batch is counted with the inputs; tables that the module keeps beside its weights are, as for
        # built-in models, left out.
        storage = Storage(allocated_bytes(self.numel(number), self.dtype(number)), -1, 0)
        made = Tensor(self.numel(number), self.dtype(number), storage)
        self.tensors[number] = made
        return made

    def parameter(self, number: int, role: WeightRole, *, is_turned: bool = False) -> Parameter:
        """A parameter, in the part of the model that reads it first.

        ``is_turned``: it has its inputs first, where products ask for the outputs.
        """
        name = self.value(number).parameter
        if name in self.parameters:
            return self.parameters[name]
        short = name.removeprefix(f"{self.prefix}.")
        known = self._known.get(name)
        trainable = known is None or known.trainable
        if known is not None and known.is_output and role is WeightRole.MATRIX:
            role = WeightRole.OUTPUT
        shape = self.shape(number)[::-1] if is_turned else self.shape(number)
        if role in (WeightRole.MATRIX, WeightRole.OUTPUT) and trainable and len(shape) > 1:
            made = self.t.matrix(short, *shape, role=role)
        else:
            made = self.t.parameter(short, *shape, role=role, trainable=trainable)
        self.parameters[name] = made
        return made


def _views_before(program: Program, sliced: set[int]) -> set[int]:
    """Of transposed views that are cut, the view that was transposed."""
    return {
        step.inputs[0]
        for step in program.steps
        if step.name in ("torch.Tensor.transpose", "torch.Tensor.permute")
        and step.outputs[0] in sliced
    }
