"""What the layers of each kind keep, by module."""

from collections.abc import Iterator

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Operation, Segment, SegmentComponent
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.spec import ModelSpec
from memplan.report.explained.kept import SizeNames, kept_storages, kept_tensors, shared_tensors
from memplan.report.explained.nodes import LayerKind


def layer_kinds(tape: Tape, model: ModelSpec) -> Iterator[LayerKind]:
    """Each kind of layer, embedding and head among them, with what it keeps for backward."""
    names = SizeNames(tape, model)
    shared = shared_tensors(tape, names)
    if shared:
        yield LayerKind(
            name="what layers share",
            count=1,
            checkpointed=False,
            in_head=False,
            tensors=shared,
            kept_bytes=sum(node.num_bytes for node in shared),
        )
    for segment in tape.segments:
        tensors = kept_tensors(segment, names)
        if tensors:
            yield LayerKind(
                name=segment.name,
                count=segment.repeat,
                checkpointed=segment.checkpointed,
                in_head=segment.component is SegmentComponent.LOGITS_AND_LOSS,
                tensors=tensors,
                kept_bytes=sum(node.num_bytes for node in tensors),
                modules=module_bytes(segment),
            )


ATTENTION, FEED_FORWARD, NORMS = "attention", "feed-forward", "norms"


def module_bytes(segment: Segment) -> tuple[tuple[str, int], ...]:
    """What a layer's modules keep: a tensor is its who keeps it first, as papers count them.

    Nothing for a checkpointed layer, which keeps its input, and for what is no layer.
    """
    if segment.checkpointed or not segment.is_layer:
        return ()
    modules = _modules(segment)
    found: dict[str, int] = {}
    for storage, users in kept_storages(segment).items():
        if users:
            name = modules[users[0]]
            found[name] = found.get(name, 0) + storage.num_bytes
    return tuple(found.items()) if len(found) > 1 else ()


def _modules(segment: Segment) -> dict[Operation, str]:
    """The module of each operation, by the weights that it or its neighbours read.

    What stands before a norm's weight is the norm's, but for the dropout and the sum that end a block.
    """
    weights: dict[Tensor, Parameter] = {}
    found: dict[Operation, str] = {}
    waiting: list[Operation] = []
    last = ""
    for operation in segment.operations:
        weight = _weight_of(operation, weights)
        if operation.kind is OperationKind.TO and weight is not None:
            weights[operation.outputs[0]] = weight
            waiting.append(operation)
            continue
        if weight is None:
            waiting.append(operation)
            continue
        module = NORMS if weight.role is WeightRole.NORM else _MODULES[weight.block]
        is_ending = module != last and last not in ("", NORMS)
        for each in waiting:
            is_ending = is_ending and (module != NORMS or each.kind in _ENDS_OF_BLOCKS)
            found[each] = last if is_ending else module
        found[operation] = module
        waiting, last = [], module
    return found | dict.fromkeys(waiting, last)


def _weight_of(operation: Operation, copies: dict[Tensor, Parameter]) -> Parameter | None:
    for tensor in operation.inputs:
        weight = tensor if isinstance(tensor, Parameter) else copies.get(tensor)
        if weight is not None:
            return weight
    return None


_ENDS_OF_BLOCKS = frozenset({OperationKind.DROPOUT, OperationKind.ADD})


_MODULES = {
    LayerBlock.ATTENTION: ATTENTION, LayerBlock.CROSS_ATTENTION: "cross-attention",
    LayerBlock.MIXER: "token mixing", LayerBlock.NETWORK: FEED_FORWARD,
    LayerBlock.EXPERTS: "experts", LayerBlock.SHARED_EXPERT: "shared experts",
}  # fmt: skip
