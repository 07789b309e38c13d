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
) -> CallBody:
    """Two linear layers around a nonlinearity."""
    drop = DropoutBody(probability=dropout)
    return CallBody(
        parts=(
            LinearBody(module=f"{module}.fc1", inputs=size, outputs=inner),
            ActivationBody(activation=activation),
            drop,
            LinearBody(module=f"{module}.fc2", inputs=inner, outputs=size),
            drop,
        )
    )


def normed(norm: str, size: int, part: TowerBody, *, drops: bool = False) -> ResidualBody:
    """A norm, a part, and their sum with what the norm read."""
    return ResidualBody(branch=(NormBody(module=norm, size=size), part), drop_path=drops)


def declare_network(table: ParameterTable, module: str, size: int, inner: int) -> None:
    """The weights of ``network``."""
    perceptron(table, module, size, inner)
