"""Parts of a model that are counted but not written down as operations: towers, projectors.

A ``ParameterTable`` collects weights the way a torch module declares them. Parameters, gradients
and optimizer states of such a part are exact; its activations are left out, and the estimate says
so.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memplan.model.towers.body import TowerBody


class WeightRole(Enum):
    """What a weight is to its module; rules ask this, never its name."""

    MATRIX = "matrix"
    """Of a linear layer."""
    QUERY_KEY = "query_key"
    """The same, of queries or of keys."""
    ATTENTION_OUTPUT = "attention_output"
    """The same, of what attention found."""
    OUTPUT = "output"
    """The model's output matrix, where it is not the token table."""
    ROUTER = "router"
    """The matrix that scores experts."""
    TOKEN_TABLE = "token_table"
    TABLE = "table"
    """Of positions, types or whatever else is looked up."""
    NORM = "norm"
    OTHER = "other"
    """Biases, factors, stacked experts."""

    __hash__ = object.__hash__


class LayerBlock(Enum):
    """The block of a layer that a weight stands in."""

    NETWORK = "network"
    """A feed-forward network, or none that is known."""
    ATTENTION = "attention"
    """Of a sequence with itself."""
    CROSS_ATTENTION = "cross_attention"
    MIXER = "mixer"
    """What mixes the tokens and is no attention, or none that is written down."""
    EXPERTS = "experts"
    """A mixture's routed experts."""
    SHARED_EXPERT = "shared_expert"


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One weight."""

    module: str
    """The module that owns it directly."""
    name: str
    """Its own name there: ``weight``, ``bias``, ``class_embedding``."""
    shape: tuple[int, ...]
    same_as: str = ""
    """The earlier weight, as ``module.name``, that it is where input and output are tied."""
    unused: bool = False
    """No loss reaches it."""
    num_experts: int = 0
    """How many routed experts' matrices it stacks; 0 where it is no such weight."""
    num_active: int = 0
    """How many of those experts each token passes."""
    num_matrices: int = 1
    """Linear layers of an expert that are fused in it."""
    trainable: bool = True
    """A class may own a parameter that it never trains: Whisper's sinusoids."""
    of_linear: bool = False
    """The weight of a ``torch.nn.Linear``, which a quantized base packs."""
    role: WeightRole = WeightRole.OTHER


class ModelPart(StrEnum):
    """What a stretch of a model is to it."""

    EMBEDDING = "embedding"
    LAYERS = "layers"
    """Layers of a stack, each a module of its own."""
    NORM = "norm"
    """What stands behind a stack's layers."""
    HEAD = "head"
    """What the task adds, with its loss."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """Weights that stand in the model ``count`` times."""

    name: str
    count: int
    parameters: tuple[ParameterShape, ...]
    idle: bool = False
    """Experts that a token does not pass."""
    body: TowerBody | None = None
    """What is computed with them; None: they are only counted."""

    @property
    def part(self) -> ModelPart:
        """What it is to the model, as torch's modules are called: the last of its names says it."""
        last = self.name.rpartition(".")[2]
        if self.name == "head":
            return ModelPart.HEAD
        return next((part for end, part in _ENDINGS if last.endswith(end)), ModelPart.OTHER)

    @property
    def owner(self) -> str:
        """The part of a model that people freeze as a whole and that it is of; empty: none."""
        return owner_of(self.name)

    @property
    def beside(self) -> str:
        """The tower or projector beside the language model that it is of; empty where it is none."""
        return beside_of(self.name)


def owner_of(name: str) -> str:
    """The part of a model that people freeze as a whole and that a segment is of; empty: none.

    >>> owner_of("vision_model.layers"), owner_of("layers")
    ('vision_tower', '')
    """
    first = name.partition(".")[0]
    return next((part for begins, part in _OWNERS if first.startswith(begins)), "")


def beside_of(name: str) -> str:
    """The tower or projector beside a language model that a segment is of; empty where it is none.

    >>> beside_of("vision_tower.layers"), beside_of("vision_model.layers")
    ('vision_tower', '')
    """
    first = name.partition(".")[0]
    return first if first.endswith(("_tower", "_projector")) or first in _BESIDE else ""


_ENDINGS = (
    ("layers", ModelPart.LAYERS),
    ("embed", ModelPart.EMBEDDING),
    ("norm", ModelPart.NORM),
)
_OWNERS = (
    ("vision", "vision_tower"), ("video", "vision_tower"), ("visual", "vision_tower"),
    ("audio", "audio_tower"), ("text_model", "text_tower"), ("encoder", "encoder"),
    ("decoder", "decoder"), ("projector", "projector"), ("qformer", "projector"),
)  # fmt: skip
"""How blocks' names begin, and the field of ``FrozenParts`` that they belong to."""
_BESIDE = frozenset({"projector", "qformer", "vqgan", "talker", "token2wav", "vocoder"})
"""Parts that stand beside a language model and are not broken down further."""


_NAMED_ROLES = {
    "q_proj": WeightRole.QUERY_KEY,
    "k_proj": WeightRole.QUERY_KEY,
    "lm_head": WeightRole.OUTPUT,
}


def _role_of(module: str) -> WeightRole:
    """What a linear layer is, as transformers' classes call it."""
    return _NAMED_ROLES.get(module.rpartition(".")[2], WeightRole.MATRIX)


class ParameterTable:
    """Collects blocks of weights.

    >>> table = ParameterTable()
    >>> with table.block("vision_tower.layers", count=2):
    ...     table.linear("mlp.fc1", 8, 32)
    ...     table.norm("layer_norm1", 8)
    >>> sum(len(block.parameters) * block.count for block in table.blocks())
    8
    """

    def __init__(self) -> None:
        self._blocks: list[ParameterBlock] = []
        self._open: list[ParameterShape] = []
        self._body: TowerBody | None = None

    @contextmanager
    def block(
        self, name: str, *, count: int = 1, idle: bool = False, body: TowerBody | None = None
    ) -> Iterator[None]:
        """Collect what is declared inside as one block; a count of 0 leaves it out.

        ``body`` says what is computed with it.
        """
        outer, self._open, self._body = self._open, [], body
        yield
        if count and (self._open or self._body is not None):
            self._blocks.append(ParameterBlock(name, count, tuple(self._open), idle, self._body))
        self._open = outer

    def computes(self, body: TowerBody | None) -> None:
        """Say what the open block computes, where that is known only when its weights are declared."""
        self._body = body

    def blocks(self) -> tuple[ParameterBlock, ...]:
        """Everything collected so far."""
        return tuple(self._blocks)

    def add(self, *blocks: ParameterBlock) -> None:
        """Take blocks that another table collected."""
        self._blocks += blocks

    def parameter(self, module: str, name: str, *shape: int, unused: bool = False) -> None:
        """Declare a weight that is no layer's."""
        self._open.append(ParameterShape(module, name, shape, unused=unused))

    def untrained(self, module: str, name: str, *shape: int) -> None:
        """Declare a weight that the class itself keeps from being trained."""
        self._open.append(ParameterShape(module, name, shape, trainable=False))

    def experts(
        self,
        module: str,
        name: str,
        *shape: int,
        active: int,
        matrices: int = 1,
        count: int | None = None,
    ) -> None:
        """Declare a weight that stacks the matrices of all routed experts.

        There are ``shape[0]`` of them, or ``count`` where they have no dimension of their own.
        """
        experts = shape[0] if count is None else count
        stacked = ParameterShape(
            module, name, shape, num_experts=experts, num_active=active, num_matrices=matrices
        )
        self._open.append(stacked)

    def shapes(self) -> tuple[ParameterShape, ...]:
        """Weights that were declared outside any block."""
        return tuple(self._open)

    def tied(self, module: str, same_as: str, num_rows: int, width: int) -> None:
        """Declare an output matrix that is an earlier table where the model ties the two."""
        self._open.append(
            ParameterShape(module, "weight", (num_rows, width), same_as, role=WeightRole.OUTPUT)
        )

    def linear(
        self, module: str, in_features: int, out_features: int, *, bias: bool = True
    ) -> None:
        """``torch.nn.Linear``."""
        self._open.append(
            ParameterShape(
                module,
                "weight",
                (out_features, in_features),
                of_linear=True,
                role=_role_of(module),
            )
        )
        if bias:
            self.parameter(module, "bias", out_features)

    def norm(self, module: str, size: int, *, bias: bool = True) -> None:
        """A normalization with a weight, and a bias unless it is an RMS norm."""
        self._open.append(ParameterShape(module, "weight", (size,), role=WeightRole.NORM))
        if bias:
            self._open.append(ParameterShape(module, "bias", (size,), role=WeightRole.NORM))

    def embedding(self, module: str, num_rows: int, width: int, *, unused: bool = False) -> None:
        """``torch.nn.Embedding``."""
        table = WeightRole.TABLE
        self._open.append(
            ParameterShape(module, "weight", (num_rows, width), unused=unused, role=table)
        )

    def convolution(
        self,
        module: str,
        in_channels: int,
        out_channels: int,
        *kernel: int,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        """``torch.nn.Conv1d``, ``2d`` or ``3d``, by the number of kernel sizes."""
        self.parameter(module, "weight", out_channels, in_channels // groups, *kernel)
        if bias:
            self.parameter(module, "bias", out_channels)
