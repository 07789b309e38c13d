"""The arithmetic of an estimate as a tree: phase, lifetime, component, tensors, formula, source."""

from collections.abc import Sequence

from memplan.estimator import Estimate
from memplan.estimator.recording import kept_dtype, record_and_walk, tape_options
from memplan.fast_dataclass import dataclass
from memplan.report.explained.account import phase_node
from memplan.report.explained.layers import layer_kinds
from memplan.report.explained.nodes import LayerKind, Node, times, walk_nodes
from memplan.training.precision import PRECISIONS
from memplan.upward import Displayed

EXPLAIN_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation(Displayed):
    """Everything that ``memplan explain`` shows."""

    answer: Estimate
    """What is explained."""

    phases: tuple[Node, ...]
    """In order; each split by lifetime, then component."""
    peak: str
    """Name of the fullest one."""
    layers: tuple[LayerKind, ...]
    kept_bytes: int
    """What all layers keep between the passes, as the walk counts it."""

    def rows(self) -> list[dict[str, object]]:
        """Flat rows: every node of every phase, then every layer kind's tensors."""
        return explanation_rows(self)

    def to_dict(self) -> dict[str, object]:
        """The document that ``memplan explain --format json`` writes."""
        from memplan.report.rows.documents import document

        rows = self.rows()
        if self.answer.setup.pipeline is not None:
            from memplan.report.stages import stage_rows  # only where there are any

            rows += stage_rows(self.answer)
        return document(
            rows, schema_version=EXPLAIN_SCHEMA_VERSION, assumptions=self.answer.assumptions
        )


def explain_estimate(found: Estimate) -> Explanation:
    """Take an estimate apart."""
    tape, passes = record_and_walk(found.model, tape_options(found.setup, found.gpu))
    kinds = tuple(layer_kinds(tape, found.model))
    # A pipeline's rank keeps its own stages' share, of several micro-batches.
    of_rank = kinds if found.setup.pipeline is None else ()
    return Explanation(
        answer=found,
        phases=tuple(phase_node(phase, found, tape, of_rank) for phase in found.account.phases),
        peak=found.peak_phase,
        layers=kinds,
        kept_bytes=passes.after_forward.total_bytes,
    )


def states_line(found: Estimate) -> str:
    """The formats that parameters, gradients and states are held in."""
    formats = PRECISIONS[found.setup.chosen_precision]
    gradients, states = formats.gradients, formats.optimizer_states
    weights = f"weights {formats.weights.label}"
    if found.setup.adapter is not None:
        frozen, kept = formats.compute, kept_dtype(found.setup)
        weights = f"frozen weights {frozen.label}, trained ones {kept.label}"
        if not formats.master_weights:
            gradients = states = kept
    parts = [weights, f"gradients {gradients.label}", f"optimizer states {states.label}"]
    if formats.master_weights:
        parts.append("master weights fp32")
    return ", ".join(parts)


def explanation_rows(explained: Explanation) -> list[dict[str, object]]:
    """Flat rows: every node of every phase, then every layer kind's tensors."""
    rows: list[dict[str, object]] = []
    for phase in explained.phases:
        path: list[str] = []
        for depth, node in walk_nodes(phase):
            path[depth:] = [node.name]
            rows.append(_node_row("account", path, node))
    for kind in explained.layers:
        for tensor in kind.tensors:
            rows.append(_node_row("kept", [times(kind.name, kind.count), tensor.name], tensor))
        for name, num_bytes in kind.modules:
            node = Node(
                name=name, num_bytes=num_bytes, formula="", source="what it keeps, together"
            )
            rows.append(_node_row("module", [times(kind.name, kind.count), name], node))
    return rows


def _node_row(section: str, path: Sequence[str], node: Node) -> dict[str, object]:
    return {
        "section": section,
        "path": "/".join(path),
        "bytes": node.num_bytes,
        "formula": node.formula,
        "source": node.source,
    }
