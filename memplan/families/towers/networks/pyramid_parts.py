"""What the layers of narrowing image transformers share: norms before parts, networks, drops."""

from memplan.families.towers.layers import perceptron
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import CallBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.nets import DropoutBody
from memplan.model.towers.parts import ActivationBody, LinearBody, NormBody


def network(
    module: str,
    size: int,
    inner: int,
    activation: Activation,
    *,
    dropout: float = 0.0,
    between: tuple[TowerBody, ...] = (),
    inner_dropout: bool = True,
) -> CallBody:
    """Two linear layers around a nonlinearity; ``between`` stands before it."""
    drop = DropoutBody(probability=dropout)
    return CallBody(
        parts=(
            LinearBody(module=f"{module}.fc1", inputs=size, outputs=inner),
            *between,
            ActivationBody(activation=activation),
            *((drop,) if inner_dropout else ()),
            LinearBody(module=f"{module}.fc2", inputs=inner, outputs=size),
            drop,
        )
    )


def normed(
    norm: str, size: int, part: TowerBody, *, drops: bool = False, names_branch: bool = False
) -> ResidualBody:
    """A norm, a part, and their sum with what the norm read."""
    return ResidualBody(
        branch=(NormBody(module=norm, size=size), part), drop_path=drops, names_branch=names_branch
    )


def declare_network(table: ParameterTable, module: str, size: int, inner: int) -> None:
    """The weights of ``network``."""
    perceptron(table, module, size, inner)


def dropping(depth: int, *, is_first: bool, drops: bool) -> tuple[tuple[int, bool], ...]:
    """Layers of a stage in runs, and whether each drops samples: a model's very first layer never does.

    >>> dropping(3, is_first=True, drops=True)
    ((1, False), (2, True))
    """
    one = min(1, depth) if is_first else 0
    return ((one, False), (depth - one, drops))
