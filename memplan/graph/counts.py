"""Counts that are read off the tape: parameters, by component and by module."""

from collections import Counter

from memplan.fast_dataclass import dataclass, field, replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.graph.model import record_model
from memplan.model.parameters import LayerBlock, ModelPart
from memplan.model.spec import ModelSpec, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """How many parameters a model has; what another tape is recorded for is counted when it is asked for."""

    model: ModelSpec = field(repr=False, compare=False)
    total: int
    """With the task's head; shared ones once."""
    largest_layer: int
    """Of the module that owns the most directly: DeepSpeed's rule."""
    active: int
    """That one token passes through; equal to ``total`` without a mixture of experts."""
    largest_layer_unfused: int
    """As ``largest_layer``, each expert's matrices counted on their own."""
    components: tuple[tuple[str, int], ...]
    """By component, largest first."""

    @property
    def base(self) -> int:
        """Of the model without a head: what ``AutoModel`` makes."""
        if self.model.task is Task.BASE:
            return self.total
        return num_parameters(replace(self.model, task=Task.BASE))

    @property
    def untied(self) -> int:
        """With input and output matrices apart; equal to ``total`` where they are."""
        model = self.model
        if not model.head.tied or model.task not in _LANGUAGE_MODELS:
            return self.total
        return num_parameters(replace(model, head=replace(model.head, tied=False)))


def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Count a model's parameters.

    Equations: every weight of every operation once, shared ones once.
    """
    tape = record_model(model, TapeOptions())
    return ParameterCounts(
        model=model,
        total=total_parameters(tape),
        largest_layer=largest_layer_parameters(tape),
        active=active_parameters(tape),
        largest_layer_unfused=largest_layer_unfused(tape),
        components=tuple(component_parameters(tape).most_common()),
    )


_LANGUAGE_MODELS = frozenset({Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.MASKED_LM, Task.PRETRAINING})


def num_parameters(model: ModelSpec) -> int:
    """Parameters of a model with its task's head, shared ones once.

    Counts on a tape that is recorded for it: ``count_parameters`` says where they are.
    """
    return total_parameters(record_model(model, TapeOptions()))


def total_parameters(tape: Tape) -> int:
    """Parameters of all segments, repetitions included."""
    return sum(
        parameter.num_weights * segment.num_copies
        for segment in tape.segments
        for parameter in segment.parameters
    )


def trainable_parameters(tape: Tape) -> int:
    """Those of them that are trained."""
    return sum(
        parameter.num_weights * segment.num_copies
        for segment in tape.segments
        for parameter in segment.parameters
        if parameter.requires_grad
    )


def active_parameters(tape: Tape) -> int:
    """Parameters that one token passes through: of the routed experts, only the chosen ones."""
    return sum(
        parameter.active_numel * segment.num_copies
        for segment in tape.segments
        for parameter in segment.parameters
    )


def largest_layer_unfused(tape: Tape) -> int:
    """The largest module, where each expert's matrix is a module of its own.

    Experts that have no dimension of their own in a weight stay together (DBRX).
    """
    sizes = [0]
    for segment in tape.segments:
        owned: Counter[str] = Counter()
        for parameter in segment.parameters:
            if parameter.experts is None or parameter.experts.num_experts not in (
                1,
                parameter.shape[0],
            ):
                owned[parameter.module] += parameter.num_weights // parameter.num_modules
            else:
                sizes.append(parameter.unfused_numel)
        for module, weight in segment.tied:
            owned[module] += weight.num_weights
        sizes.append(max(owned.values(), default=0))
    return max(sizes)


def module_parameters(segment: Segment) -> Counter[str]:
    """Parameters that each module of a segment owns itself, tied ones of others too."""
    owned: Counter[str] = Counter()
    for parameter in segment.parameters:
        owned[parameter.module] += parameter.num_weights // parameter.num_modules
    for module, weight in segment.tied:
        owned[module] += weight.num_weights
    return owned


def largest_layer_parameters(tape: Tape) -> int:
    """The most parameters that one module owns directly (DeepSpeed 0.19.8, stage3.py:4055)."""
    return max(
        (size for segment in tape.segments for size in module_parameters(segment).values()),
        default=0,
    )


def component_of(segment: Segment, parameter: Parameter) -> str:
    """Which part of a model, as people speak of it, a parameter belongs to."""
    module = parameter.module
    if segment.beside:
        return segment.beside.replace("_", " ")
    if segment.part is ModelPart.EMBEDDING:
        return "embeddings"
    if segment.part is ModelPart.HEAD:
        return "head"
    for part, component in _COMPONENTS:
        if part in f"{module}.".lower():
            is_crossing = parameter.block is LayerBlock.CROSS_ATTENTION and part == "attn"
            return "cross-attention" if is_crossing else component
    return _BLOCKS.get(parameter.block, "feed-forward")


_COMPONENTS = (
    ("norm", "norms"),
    ("mamba", "state space"),
    ("mixer", "token mixing"),
    ("cross_attn", "cross-attention"),
    ("attn", "attention"),
    ("expert", "experts"),
    ("mlp.gate.", "router"),
    ("router", "router"),
)
"""What stands in a module's name, and the component it belongs to; the first match counts."""


_BLOCKS = {
    LayerBlock.ATTENTION: "attention",
    LayerBlock.CROSS_ATTENTION: "cross-attention",
}
"""Where a class's own names say nothing: the block that it declares a weight in."""


def component_parameters(tape: Tape) -> Counter[str]:
    """Parameters by component."""
    found: Counter[str] = Counter()
    for segment in tape.segments:
        for parameter in segment.parameters:
            found[component_of(segment, parameter)] += parameter.num_weights * segment.num_copies
    return found
