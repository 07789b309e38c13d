"""A pipeline's stage: a model of which a part is left."""

from memplan.classes.base import joined_in, text_of
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.training.splitting.parallelism import StagePlace


class Identity(Module):
    """What stands where another stage has a module."""

    def forward(self, x: Handle) -> Handle:
        """The same tensor."""
        return x


def cut(model: Module, place: StagePlace) -> None:
    """Leave what a stage has beside its layers.

    Of a base model the first stage has what it declares before them, the last one what owns weights
    behind them; a weight whose owner is on another stage becomes a copy. What sees and hears goes with
    the embedding, which what it gives is written over.
    """
    if not place.is_first:
        _leave_towers(model)
    base, layers = layered(model)
    is_before = True
    for name, each in list(base.children.items()):
        if each is layers:
            is_before = False
        elif not (
            place.is_first if is_before and each.segment is None
            else place.is_last or not any(each.parameters())
        ):  # fmt: skip
            base.children[name] = Identity()
            object.__setattr__(base, name, base.children[name])
    owned = set(model.parameters())
    for _, module in model.modules():
        for name, weight in list(module.weights.items()):
            if weight not in owned:
                setattr(module, name, weight.copy())


def _leave_towers(model: Module) -> None:
    """Another stage has what stands beside the text model."""
    around = joined_in(model)
    if around is None:
        return
    for name, each in list(around.children.items()):
        if each is not around.text_part:
            setattr(around, name, Identity())
    around.weights.clear()
    around.text_part.joiner = None


def layered(model: Module) -> tuple[Module, LayerList]:
    """The module of the text model that has the layers, and these; of a class without any, itself and none."""
    model = text_of(model)
    found = (
        (module, each)
        for module in (model, *(each for _, each in model.modules()))
        for each in module.children.values()
        if isinstance(each, LayerList)
    )
    return next(found, (model, LayerList("", (), lambda _: model)))
