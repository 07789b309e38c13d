"""What an explanation is made of."""

from collections import Counter
from collections.abc import Iterable, Iterator

from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One figure, how it comes about, and what it is made of."""

    name: str
    num_bytes: int
    formula: str = ""
    source: str = ""
    children: tuple["Node", ...] = ()
    stands_out: bool = False
    """It is shown however small it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """Layers that keep the same, and what one of them keeps for the backward pass."""

    name: str
    count: int
    checkpointed: bool
    in_head: bool
    """It is the head, whose bytes count as logits and loss."""
    tensors: tuple[Node, ...]
    """What one keeps, largest first."""
    kept_bytes: int
    """All of it, for one layer."""
    modules: tuple[tuple[str, int], ...] = ()
    """Its attention, its feed-forward network, its norms, and what each keeps of it [bytes]."""


def walk_nodes(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    """A node and everything below it, with depths."""
    yield depth, node
    for child in node.children:
        yield from walk_nodes(child, depth + 1)


def times(name: str, count: int) -> str:
    """``decoder.layers x 32``."""
    return f"{name} x {count}" if count > 1 else name


PLURAL = {
    OperationKind.FLASH_ATTENTION: "flash_attention's statistics",
    OperationKind.CUDNN_ATTENTION: "cudnn_attention's statistics",
    OperationKind.EFFICIENT_ATTENTION: "efficient_attention's statistics",
    OperationKind.DROPOUT: "dropout mask",
    OperationKind.LAYER_NORM: "layer_norm's statistics",
    OperationKind.RMS_NORM: "rms_norm's statistics",
    OperationKind.NLL_LOSS: "nll_loss's weight",
}
"""What an operation makes beside its result."""


def grouped(nodes: Iterable[Node]) -> list[Node]:
    """Equal lines as one, with how many there are."""
    counts = Counter(nodes)
    return [
        node
        if count == 1
        else Node(
            name=times(node.name, count), num_bytes=count * node.num_bytes,
            formula=f"{count} x {node.formula}", source=node.source,
        )
        for node, count in counts.items()
    ]  # fmt: skip
