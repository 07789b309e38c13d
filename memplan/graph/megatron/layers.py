"""Linear layers and norms: Megatron-core's own, and TransformerEngine's in their place.

Megatron-core 0.16.1, core/tensor_parallel/layers.py, core/extensions/transformer_engine.py.
"""

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.megatron.config import MegatronModule, Part, TransformerConfig
from memplan.graph.megatron.recomputation import recompute_into_product
from memplan.graph.modules.handles import Handle
from memplan.graph.operations import megatron, transformer_engine
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
        """Over the last dimension."""
        weights = [self.parameter(each) for each in self.weights.values()]
        return Handle(self.run, megatron.norm(self.run, x.record, weights), x.shape)


class IdentityOp(MegatronModule):
    """core/transformer/identity_op.py: what stands where a module is part of another."""

    def __init__(self, *_: object) -> None:
        pass

    def forward(self, x: Handle) -> Handle:
        """The same tensor."""
        return x


class ParallelLinear(MegatronModule):
    """A product with a part of a weight; its bias may be left to others to add."""

    has_norm = False
    """It norms what it is given itself."""

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
        self.config, self.skip_bias_add = config, skip_bias_add
        if self.has_norm:
            assert norm is not None
            self.layer_norm_weight = Part(width)
            if norm.kind in LAYER_NORMS:
                self.layer_norm_bias = Part(width)
        self.weight = Part(columns, width, ranks=self.ranks)
        if bias:
            self.bias = Part(columns, ranks=self.bias_ranks)

    @property
    def ranks(self) -> int:
        """How many have a part of its weight."""
        return self.config.degree

    @property
    def bias_ranks(self) -> int:
        """The same of its bias."""
        return self.ranks

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        """What it computes."""
        raise NotImplementedError

    def norms(self) -> list[Parameter]:
        """Weights of its own norm."""
        names = [name for name in self.weights if name.startswith("layer_norm_")]
        return [self.parameter(self.weights[name]) for name in names]

    def forward(self, x: Handle) -> WithBias:
        """Of (tokens, sequences, width)."""
        run, weight = self.run, self.parameter(self.weight)
        if self.weight.owner is not self:
            run.tie(weight, self.within)
        bias = self.parameter(self.weights["bias"]) if "bias" in self.weights else None
        made = self.product(x.record, weight, None if self.skip_bias_add else bias)
        shape = made.numel // (x.shape[1] * weight.shape[0]), x.shape[1], weight.shape[0]
        skipped = Handle(run, bias, bias.shape) if bias is not None and self.skip_bias_add else None
        return Handle(run, made, shape), skipped


class ColumnParallelLinear(ParallelLinear):
    """With this rank's columns."""

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        """Of all tokens."""
        return megatron.column_product(self.run, x, weight, bias)


class RowParallelLinear(ParallelLinear):
    """With this rank's rows, the ranks' results added up: whole, or each its share."""

    @property
    def bias_ranks(self) -> int:
        """It is added to the sum."""
        return 1

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:  # noqa: ARG002
        """Of all tokens, then the sum."""
        run = self.run
        made = megatron.product(run, x, weight, x.numel // weight.shape[1])
        return reduced(run, made)


def reduced(run: Tape, x: Tensor) -> Tensor:
    """Partial results of all tokens: all-reduced where they lie, or scattered into shares."""
    ranks = megatron.sequence_ranks(run)
    if ranks > 1:
        return megatron.scattered(run, x, ranks)
    return x if megatron.tensor_ranks(run) == 1 else megatron.all_reduced(run, x)


class TELayerNormColumnParallelLinear(ParallelLinear):
    """A norm and a product with this rank's columns."""

    has_norm = True

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        """One function."""
        return transformer_engine.norm_product(self.run, x, self.norms(), weight, bias)


class TEColumnParallelLinear(ParallelLinear):
    """With this rank's columns, of what was normed elsewhere."""

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:  # noqa: ARG002
        """Of all tokens."""
        return transformer_engine.column_product(self.run, x, weight)


class TERowParallelLinear(RowParallelLinear):
    """With this rank's rows, added up inside."""

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:  # noqa: ARG002
        """One function."""
        return transformer_engine.row_product(self.run, x, weight)


class TELinear(ParallelLinear):
    """Of a rank's share of the tokens, with a weight that is whole on every rank (``duplicated``)."""

    @property
    def ranks(self) -> int:
        """It is no part."""
        return 1

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:  # noqa: ARG002
        """Without an exchange."""
        return transformer_engine.own_product(self.run, x, weight)


class KwaiColumnParallelLinear(ParallelLinear):
    """A norm, and a product with this rank's columns that computes it again itself."""

    has_norm = True

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        """Two functions."""
        run, start = self.run, len(self.run.segment.operations)
        normed = megatron.norm(run, x, self.norms())
        made = megatron.column_product(run, normed, weight, bias)
        recompute_into_product(run, start)
        return made


class KwaiRowParallelLinear(RowParallelLinear):
    """With this rank's rows, added up at once."""

    def product(self, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:  # noqa: ARG002
        """One function."""
        return megatron.row_product(self.run, x, weight)
