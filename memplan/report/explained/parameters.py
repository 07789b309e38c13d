"""Parameters by module."""

from collections import Counter
from typing import TYPE_CHECKING

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter

if TYPE_CHECKING:
    from memplan.dtypes import DType

from memplan.report.explained.nodes import Node, times


def parameter_nodes(tape: Tape) -> tuple[Node, ...]:
    """Weights by segment, equal layers together; an adapter's apart from the model's own."""
    found = _segment_nodes(tape, of_adapter=False)
    adapter = _segment_nodes(tape, of_adapter=True)
    if not adapter:
        return found
    counts: Counter[DType] = Counter()
    for segment in tape.segments:
        for each in segment.parameters:
            if each.of_adapter:
                counts[each.dtype] += each.numel * segment.num_copies
    whole = Node(
        name="what is trained beside them",
        num_bytes=sum(node.num_bytes for node in adapter),
        formula=" + ".join(
            f"{count:,} x {dtype.num_bytes} B ({dtype.label})" for dtype, count in counts.items()
        ),
        stands_out=True,
        children=adapter,
    )
    return (*found, whole)


def _segment_nodes(tape: Tape, *, of_adapter: bool) -> tuple[Node, ...]:
    found = []
    for segment in tape.segments:
        own = [each for each in segment.parameters if each.of_adapter is of_adapter]
        if own:
            copies = segment.num_copies
            found.append(
                Node(
                    name=times(segment.name, copies),
                    num_bytes=copies * sum(each.storage.num_bytes for each in own),
                    children=tuple(_parameter_node(each, copies) for each in own),
                )
            )
    return tuple(found)


def _parameter_node(parameter: Parameter, copies: int) -> Node:
    shape = " x ".join(f"{size:,}" for size in parameter.matrix_shape)
    times = f"{copies} x " if copies > 1 else ""
    dtype = parameter.dtype
    formula = f"{times}{shape} x {dtype.num_bytes} B ({dtype.label})"
    if parameter.packed is not None:
        each = parameter.numel * dtype.num_bytes / parameter.num_weights
        formula = f"{times}{shape} x {each:g} B ({parameter.packed.quantization.kind.value} codes)"
    return Node(
        name=parameter.name,
        num_bytes=copies * parameter.storage.num_bytes,
        formula=formula,
    )
