"""Models of which only the weights are known: each is declared, with a gradient that appears in backward."""

from collections.abc import Sequence

from memplan.classes.heads import Task
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.modules.basic import Embedding
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.run import Run
from memplan.model.parameters import ModelPart


class Parts(Module):
    """Modules and weights by their names, of a class that is counted."""

    def __init__(self, **parts: Module | Weight) -> None:
        for name, made in parts.items():
            setattr(self, name, made)


def declare_all(task: Task) -> Tensor:
    """Weights alone: tables, what stands beside the layers, layers, and what the task adds."""
    run, base = task.run, task.base
    lists = [each for _, each in base.modules() if isinstance(each, LayerList)]
    inside = {id(each) for layers in lists for _, each in layers.modules()}
    own = [each for each in (base, *_all(base)) if id(each) not in inside]
    tables: list[Module] = [each for each in own if isinstance(each, Embedding)]
    made = counted(run, tables or own)
    others = [each for each in own if each.weights and not isinstance(each, Embedding)]
    if tables and others:
        run.start("model", made, part=ModelPart.OTHER)
        made = counted(run, others)
    for layers in lists:
        run.beginnings[layers.segment_name] = layers.beginning
        for turn in layers.runs():
            run.start(
                layers.segment_name, made, part=ModelPart.LAYERS, repeat=turn.count,
                frozen=turn.frozen,
            )  # fmt: skip
            layer = layers.made[turn.kind]
            made = counted(run, [layer, *_all(layer)])
    head = [each for name, each in task.children.items() if name != task.prefix]
    if head or task.weights:
        run.start("head", made, part=ModelPart.HEAD, frozen=task.is_frozen(ModelPart.HEAD))
        made = counted(run, [task, *(inner for each in head for inner in (each, *_all(each)))])
    return made


def _all(module: Module) -> list[Module]:
    return [each for _, each in module.modules()]


def counted(run: Run, modules: Sequence[Module]) -> Tensor:
    """Modules' own weights, of which one operation without a size reads all."""
    weights = [_owned(each, weight) for each in modules for weight in each.weights.values()]
    made = run.tensor(0, DType.FP32)
    if weights:
        gradients = (Gradient.FRESH,) * len(weights)
        run.record(OperationKind.COUNTED, weights, (made,), gradients=gradients)
    return made


def _owned(module: Module, weight: Weight) -> Parameter:
    """A weight on the tape; another module's is this one's too."""
    found = module.parameter(weight)
    if weight.owner is not module:
        module.run.tie(found, module.within)
    return found
