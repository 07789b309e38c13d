"""The modules of a model by the names of transformers' class, with the place each has on the tape."""

from collections.abc import Iterator
from enum import Enum

from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.overlay import weight_key
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.graph.remembered import OF_TAPES
from memplan.model.parameters import ModelPart, WeightRole
from memplan.model.spec import ModelSpec, Task

OUTPUT_MATRIX = "lm_head"
"""The module that gives the logits, on the tape; its weight may be the token table."""

MASKED_OUTPUT = "decoder"
"""The same of a masked language model that owns it."""


class ModuleKind(Enum):
    """What a module is to an adapter."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    OTHER = "other"
    WEIGHT = "weight"
    """No module at all, but one weight of such a one."""

    @property
    def adaptable(self) -> bool:
        """Whether an adapter can stand beside it."""
        return self in {ModuleKind.LINEAR, ModuleKind.EMBEDDING}


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module that owns weights."""

    name: str
    """As ``named_modules()`` has it."""
    segment: str
    """The name of its segment on the tape."""
    repetition: int
    """Which of the segments of that name, all their repetitions counted."""
    module: str
    """Its name on the tape."""
    kind: ModuleKind
    is_output: bool = False
    """It is the matrix that gives the logits (``get_output_embeddings``)."""


def named_modules(model: ModelSpec, tape: Tape) -> tuple[NamedModule, ...]:
    """Every module of a model that owns weights, in the order of its tape."""
    # Other tasks' classes (CTC) do not say which matrix it is.
    has_output = model.task is not Task.OTHER
    found: list[NamedModule] = []
    begun: dict[str, int] = {}
    for segment in tape.segments:
        kinds = _kinds(segment, is_class=model.blueprint is not None)
        # A traced module and a class say by their weights which of their layers is the last.
        by_weights = model.traced is not None or (model.blueprint is not None and has_output)
        outputs = {
            each.module
            for each in segment.parameters
            if by_weights and each.role is WeightRole.OUTPUT
        }
        if model.blueprint and has_output:
            outputs |= {module for module, weight in segment.tied if len(weight.matrix_shape) > 1}
        first = begun.get(segment.name, 0)
        for repetition in range(first, first + segment.num_copies):
            found += [
                NamedModule(
                    full_name(tape.beginnings.get(segment.name), segment, module, repetition), segment.name,
                    repetition, module, kind,
                    module in outputs
                    or (has_output and segment.part is ModelPart.HEAD and kind is not ModuleKind.OTHER
                        and module in (OUTPUT_MATRIX, MASKED_OUTPUT)),
                )
                for module, kind in kinds.items()
            ]  # fmt: skip
        begun[segment.name] = first + segment.num_copies
    return tuple(found)


def named_weights(model: ModelSpec, tape: Tape) -> tuple[NamedModule, ...]:
    """Every matrix, and stack of matrices, that belongs to no embedding.

    Its name is the parameter's, and on the tape its key among ranks.
    """
    found: list[NamedModule] = []
    begun: dict[str, int] = {}
    for segment in tape.segments:
        kinds = _kinds(segment, is_class=model.blueprint is not None)
        first = begun.get(segment.name, 0)
        begun[segment.name] = first + segment.num_copies
        weights = [
            each
            for each in segment.parameters
            if len(each.shape) in (2, 3) and kinds[each.module] is not ModuleKind.EMBEDDING
        ]
        for repetition in range(first, first + segment.num_copies):
            for each in weights:
                short = each.name.removeprefix(f"{each.module}.")
                module = full_name(
                    tape.beginnings.get(segment.name), segment, each.module, repetition
                )
                found.append(
                    NamedModule(
                        f"{module}.{short}", segment.name, repetition,
                        weight_key(each.module, short), ModuleKind.WEIGHT,
                    )
                )  # fmt: skip
    return tuple(found)


def named_parameters(tape: Tape) -> Iterator[tuple[str, str, int, str]]:
    """Every parameter's name as ``named_parameters()`` has it, its segment, which repetition, and its name on the tape."""
    begun: dict[str, int] = {}
    for segment in tape.segments:
        first = begun.get(segment.name, 0)
        begun[segment.name] = first + segment.num_copies
        for repetition in range(first, first + segment.num_copies):
            for each in segment.parameters:
                short = each.name.removeprefix(f"{each.module}.")
                module = full_name(
                    tape.beginnings.get(segment.name), segment, each.module, repetition
                )
                name = f"{module}.{short}".replace("..", ".").removeprefix(".")
                yield name, segment.name, repetition, each.name


@OF_TAPES.remembered(maxsize=8)
def module_depths(tape: Tape) -> dict[Parameter, int]:
    """How deep in the model each parameter's own module lies: 0 is the model itself."""
    depths: dict[Parameter, int] = {}
    for segment in tape.segments:
        for each in segment.parameters:
            name = full_name(tape.beginnings.get(segment.name), segment, each.module, 0)
            depths[each] = len([part for part in name.split(".") if part])
    return depths


def _kinds(segment: Segment, *, is_class: bool) -> dict[str, ModuleKind]:
    """The modules of a segment, and what each is: as its class says, or by what is done with its weight."""
    kinds: dict[str, ModuleKind] = {}
    for parameter in segment.parameters:
        kinds.setdefault(parameter.module, ModuleKind.OTHER)
        if parameter.of_linear:
            kinds[parameter.module] = ModuleKind.LINEAR
    own, tied = set(segment.parameters), {weight: module for module, weight in segment.tied}
    for operation in segment.operations:
        for tensor in operation.inputs:
            if not isinstance(tensor, Parameter) or tensor.name != f"{tensor.module}.weight":
                continue
            if operation.kind is OperationKind.LINEAR and len(tensor.shape) == 2:
                is_tied = tensor not in own
                if is_tied or not is_class:
                    owner = tied.get(tensor, OUTPUT_MATRIX) if is_class else OUTPUT_MATRIX
                    kinds[owner if is_tied else tensor.module] = ModuleKind.LINEAR
            elif operation.kind is OperationKind.EMBEDDING and tensor in own:
                kinds[tensor.module] = ModuleKind.EMBEDDING
    return kinds


def full_name(beginning: str | None, segment: Segment, module: str, repetition: int) -> str:
    """A module's name in transformers' class, whose ``beginning`` has ``{}`` for a layer's number; Llama's where
    nothing is known.

    >>> segment = Segment("decoder.layers", 1, repeat=2, checkpointed=False, part=ModelPart.LAYERS)
    >>> full_name(None, segment, "self_attn.q_proj", 1)
    'model.layers.1.self_attn.q_proj'
    """
    if beginning is None:
        beginning = _BEGINNINGS.get(segment.part, "model.")
    return f"{beginning.format(repetition)}{module}"


_BEGINNINGS = {ModelPart.HEAD: "", ModelPart.LAYERS: "model.layers.{}."}
