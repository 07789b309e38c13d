"""A model of the same kind with more or fewer layers."""

from itertools import groupby

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.model.layers import LayerRun, LayerSpec, StackSpec
from memplan.model.spec import ModelSpec

_Layer = tuple[LayerSpec, bool]
"""A layer, and whether its parameters are shared by those like it that follow."""


def with_layers(model: ModelSpec, num_layers: int) -> ModelSpec:
    """The model with this many layers in each of its stacks, in the pattern that its own have.

    Raises ``SetupError`` for a model that is not written as a stack of layers.

    >>> from memplan.sources.models import load_model
    >>> deeper = with_layers(load_model("llama-3.2-1b"), 32)
    >>> deeper.num_layers, deeper.num_params - load_model("llama-3.2-1b").num_params
    (32, 973144064)
    """
    if not model.stacks or model.has_towers:
        msg = f"{model.name}: is not a plain stack of layers, so their number cannot be varied"
        raise SetupError(msg)
    stacks = tuple(_resized(stack, num_layers) for stack in model.stacks)
    blueprint = model.blueprint
    if blueprint is not None:
        numbers = [_numbers(_layers(stack), num_layers) for stack in model.stacks]
        blueprint = blueprint.with_layers(*numbers)
    return replace(model, stacks=stacks, blueprint=blueprint)


def _layers(stack: StackSpec) -> "list[_Layer]":
    return [(run.layer, run.shared) for run in stack.runs for _ in range(run.count)]


def _numbers(layers: "list[_Layer]", num_layers: int) -> list[int]:
    """Which of the model's own layers each is like."""
    start, period = pattern(layers)
    return [
        number if number < len(layers) else start + (number - start) % period
        for number in range(num_layers)
    ]


def _resized(stack: StackSpec, num_layers: int) -> StackSpec:
    layers = _layers(stack)
    grown = [layers[number] for number in _numbers(layers, num_layers)]
    runs = tuple(
        LayerRun(count=len(list(equal)), layer=layer, shared=shared)
        for (layer, shared), equal in groupby(grown)
    )
    return replace(stack, runs=runs)


def pattern(layers: "list[_Layer]") -> tuple[int, int]:
    """From which layer on they repeat, and after how many: as early and as short as can be.

    >>> pattern(["dense", "moe", "moe", "moe"]), pattern(list("llglgl")[1:])
    ((1, 1), (0, 2))
    """
    found = []
    for period in range(1, len(layers) + 1):
        start = len(layers) - period
        while start > 0 and layers[start - 1] == layers[start - 1 + period]:
            start -= 1
        found.append((start + period, start, period))
    _, start, period = min(found)
    return start, period
