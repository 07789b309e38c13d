"""An account, phase by phase and component by component, with formulas."""

from collections.abc import Sequence

from memplan.estimator import Estimate
from memplan.graph.core.tape import Tape
from memplan.memory.account import ComponentKind, Entry, Lifetime, Phase
from memplan.report.explained.nodes import LayerKind, Node, times
from memplan.report.explained.parameters import parameter_nodes
from memplan.report.timeline import LIFETIME_WORDS


def phase_node(phase: Phase, found: Estimate, tape: Tape, kinds: Sequence[LayerKind]) -> Node:
    """A phase, by how long its bytes are held, and in these by component."""
    children = []
    for lifetime in Lifetime:
        entries = [each for each in phase.entries if each.kind.lifetime is lifetime]
        if entries:
            children.append(
                Node(
                    name=LIFETIME_WORDS[lifetime],
                    num_bytes=sum(entry.num_bytes for entry in entries),
                    children=tuple(_entry_node(entry, found, tape, kinds) for entry in entries),
                )
            )
    return Node(name=phase.name, num_bytes=phase.peak_bytes, children=tuple(children))


def _entry_node(entry: Entry, found: Estimate, tape: Tape, kinds: Sequence[LayerKind]) -> Node:
    children: tuple[Node, ...] = ()
    if entry.kind is ComponentKind.PARAMETERS:
        children = parameter_nodes(tape)
        if sum(child.num_bytes for child in children) != entry.num_bytes:
            children = ()  # sharded, or held in another format: the engine's figure stands alone
    elif entry.kind in _KEPT_BY:
        children = _kept_parts(entry, kinds)
    return Node(
        name=entry.kind.label.replace("_", " "),
        num_bytes=entry.num_bytes,
        formula=_per_parameter(entry, found),
        source=entry.origin,
        children=children,
    )


def _kept_parts(entry: Entry, kinds: Sequence[LayerKind]) -> tuple[Node, ...]:
    """What layers keep, where all of it is alive, and what is alive beside it for the moment."""
    in_head = _KEPT_BY[entry.kind]
    parts = [
        Node(
            name=times(kind.name, kind.count),
            num_bytes=kind.count * kind.kept_bytes,
            formula=f"{kind.count} x {kind.kept_bytes:,} B" if kind.count > 1 else "",
            source="tensor by tensor below",
        )
        for kind in kinds
        if kind.in_head is in_head
    ]
    rest = entry.num_bytes - sum(part.num_bytes for part in parts)
    if rest < 0 or not parts:
        return ()  # part of it is gone by then
    if rest:
        parts.append(Node(name="held for the moment", num_bytes=rest))
    return tuple(parts)


_KEPT_BY = {ComponentKind.ACTIVATIONS: False, ComponentKind.LOGITS_AND_LOSS: True}
"""Components that layers keep, and whether it is the head."""


_PER_PARAMETER = {
    ComponentKind.PARAMETERS: "parameters",
    ComponentKind.GRADIENTS: "trained parameters",
    ComponentKind.MASTER_WEIGHTS: "trained parameters",
    ComponentKind.OPTIMIZER_STATES: "trained parameters",
}


def _per_parameter(entry: Entry, found: Estimate) -> str:
    """States as so many bytes for each parameter."""
    if entry.kind not in _PER_PARAMETER:
        return ""
    counted = found.trainable_params
    if entry.kind is ComponentKind.PARAMETERS:
        counted = found.num_params
    if not counted:
        return ""
    each = f"{entry.num_bytes / counted:.3f}".rstrip("0").rstrip(".")
    if each == "0":
        # A scalar for each tensor, not for each parameter.
        return ""
    return f"{each} B x {counted:,} {_PER_PARAMETER[entry.kind]}"
