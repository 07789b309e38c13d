"""What mixes the positions of a picture that stays a grid, as its classes write it out."""

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.towers.state import Flow
from memplan.model.towers.gridded.grids import (
    ForgottenBody,
    GridBody,
    LevelBody,
    ReturnedBody,
)


def write_grid(t: Tape, x: Tensor, body: GridBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case ForgottenBody():
            t.release(flow.named.pop())
            return x
        case ReturnedBody():
            t.hold(x)
            flow.returned.append(x)
            return x
        case LevelBody():
            t.hold(x)
            flow.levels.append((x, flow.grid))
            return x
