"""Linear layers and norms: Megatron-core's own, and others' in their place.

Megatron-core 0.16.1, core/tensor_parallel/layers.py, core/extensions/transformer_engine.py.
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.graph.megatron.config import MegatronModule, Part, TransformerConfig
from memplan.graph.megatron.recomputation import recompute_into_product
from memplan.graph.modules.fused import megatron, transformer_engine
from memplan.graph.modules.handles import Handle
from memplan.model.norms import NormKind, NormSpec

LAYER_NORMS = frozenset({NormKind.LAYER, NormKind.LAYER_ONE_PLUS})
"""Those that subtract the mean: they keep two statistics a row, and have a bias."""
WithBias = tuple[Handle, Handle | None]
"""A product, and a bias that is still to be added."""


class Norm(MegatronModule):
    """LayerNorm or RMSNorm as one kernel, whole on every rank."""

    def __init__(self, spec: NormSpec, width: int) -> None:
        self.weight = Part(width)
        if spec.kind in LAYER_NORMS:
            self.bias = Part(width)

    def forward(self, x: Handle) -> Handle:
        return megatron.norm(x, [self.operand(each) for each in self.weights.values()])


class IdentityOp(MegatronModule):
    """What stands where a module is part of another."""

    def forward(self, x: Handle) -> Handle:
        return x


class ParallelLinear(MegatronModule):
    """A product with a rank's part of a weight; its bias may be left to others to add."""

    multiply: ClassVar[Callable[..., Handle]]
    """What it computes."""
    has_norm = False
    """It norms what it is given itself."""
    is_split = True
    """Each rank has a part of the weight."""
    splits_bias = True

    def __init__(
        self,
        config: TransformerConfig,
        width: int,
        columns: int,
        *,
        bias: bool = False,
        skip_bias_add: bool = True,
        norm: NormSpec | None = None,
    ) -> None:
        self.skip_bias_add = skip_bias_add
        if norm is not None and self.has_norm:
            self.layer_norm_weight = Part(width)
            if norm.kind in LAYER_NORMS:
                self.layer_norm_bias = Part(width)
        self.weight = Part(columns, width, ranks=config.degree if self.is_split else 1)
        if bias:
            self.bias = Part(columns, ranks=config.degree if self.splits_bias else 1)

    def forward(self, x: Handle) -> WithBias:
        """Of (tokens, sequences, width)."""
        weight = self.operand(self.weight)
        if self.weight.owner is not self:
            self.run.tie(self.parameter(self.weight), self.within)
        bias = self.operand(self.weights["bias"]) if "bias" in self.weights else None
        given = {} if bias is None or self.skip_bias_add else {"bias": bias}
        made = type(self).multiply(x, weight, **given, **self.norms())
        return made, bias if self.skip_bias_add else None

    def norms(self) -> dict[str, list[Handle]]:
        """Weights of its own norm."""
        names = (name for name in self.weights if name.startswith("layer_norm_"))
        return (
            {"norms": [self.operand(self.weights[each]) for each in names]} if self.has_norm else {}
        )


class ColumnParallelLinear(ParallelLinear):
    multiply = megatron.column_product


class RowParallelLinear(ParallelLinear):
    multiply = megatron.row_product
    splits_bias = False


class TELayerNormColumnParallelLinear(ParallelLinear):
    multiply = transformer_engine.norm_product
    has_norm = True


class TEColumnParallelLinear(ParallelLinear):
    multiply = transformer_engine.column_product


class TERowParallelLinear(RowParallelLinear):
    multiply = transformer_engine.row_product


class TELinear(ParallelLinear):
    """Of a rank's share of the tokens, with a weight that is whole on every rank (``duplicated``)."""

    multiply = transformer_engine.own_product
    is_split = False


def normed_again(
    x: Handle, weight: Handle, norms: list[Handle], bias: Handle | None = None
) -> Handle:
    """A norm, and a product that computes it again itself."""
    run, start = x.run, len(x.run.segment.operations)
    made = megatron.column_product(megatron.norm(x, norms), weight, bias)
    recompute_into_product(run, start)
    return made


class KwaiColumnParallelLinear(ParallelLinear):
    multiply = normed_again
    has_norm = True


class KwaiRowParallelLinear(RowParallelLinear):
    multiply = megatron.row_product_added_up
