"""What is counted but not written down: parts of layers, and parts that stand beside a model."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.overlay import BASE_LAYER
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.model.parameters import ParameterBlock, ParameterShape


def _declared(t: Tape, each: ParameterShape) -> Parameter:
    if each.of_linear:
        made = t.matrix(
            f"{each.module}.{each.name}", *each.shape[:2], module=each.module, role=each.role
        )
        made.of_linear = True
        return made
    return t.parameter(
        f"{each.module}.{each.name}", *each.shape, module=each.module, experts=_share(each),
        role=each.role,
    )  # fmt: skip


IDLE = ExpertShare(num_experts=1, num_active=0)
"""An expert of its own that a token does not pass."""


def record_tables(t: Tape, blocks: tuple[ParameterBlock, ...], *, tied: bool = False) -> None:
    """Declare the blocks' weights, each with a gradient that appears in backward.

    They stand before the rest of the model, as the towers of vision-language models do. With
    ``tied``, a weight that names an earlier one is that one.
    """
    declared: dict[str, Parameter] = {}
    for block in blocks:
        frozen = bool(block.owner and getattr(t.options.freeze, block.owner))
        t.begin(block.name, part=block.part, repeat=block.count, frozen=frozen)
        declare_block(t, block, declared, tied=tied)
        weights = [each for each in t.segment.parameters if not each.unused]
        out = t.tensor(0, DType.FP32)
        if weights:  # else nothing runs, and no product asks for its workspace there
            gradients = (Gradient.FRESH,) * len(weights)
            t.record(OperationKind.COUNTED, weights, (out,), gradients=gradients)
        t.end(out)


def declare_block(
    t: Tape, block: ParameterBlock, declared: dict[str, Parameter], *, tied: bool
) -> None:
    """Declare a block's weights in the present segment; what ``declared`` has is of earlier ones."""
    for each in block.parameters:
        earlier = declared.get(each.same_as) if tied else None
        if earlier is None:
            declared[f"{each.module}.{each.name}"] = _declare(t, each, idle=block.idle)
        else:
            t.tie(earlier, each.module)


def _declare(t: Tape, each: ParameterShape, *, idle: bool) -> Parameter:
    if each.of_linear and not idle:
        return _adapted(t, _declared(t, each))
    made = t.parameter(
        f"{each.module}.{each.name}",
        *each.shape,
        module=each.module,
        trainable=each.trainable,
        experts=_share(each, idle=idle),
        role=each.role,
    )
    made.unused, made.of_linear = each.unused, each.of_linear
    return _adapted(t, made)


def _adapted(t: Tape, weight: Parameter) -> Parameter:
    """With the adapter that stands on its module, where one does."""
    module = weight.module.removesuffix(BASE_LAYER)
    if t.adaptation is not None and module in t.adapted and weight.name.endswith(".weight"):
        t.adaptation.declare(t, weight, module)
    if t.adaptation is not None and t.adapted:
        t.adaptation.declare_on_weight(t, weight)
    return weight


def idle_linear(t: Tape, weight: Parameter) -> None:
    """Note that a weight is the matrix of a linear layer that no gradient reaches, nor its adapter."""
    weight.unused = weight.of_linear = True
    start = len(t.segment.parameters)
    _adapted(t, weight)
    for each in t.segment.parameters[start:]:
        each.unused = True


def _share(each: ParameterShape, *, idle: bool = False) -> ExpertShare | None:
    if each.num_experts:
        return ExpertShare(each.num_experts, each.num_active, each.num_matrices)
    return IDLE if idle else None
