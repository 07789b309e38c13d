"""Linear layers that multiply in fewer than 16 bits, as a table: what each recipe makes and keeps.

Weights, gradients and optimizer states stay as the precision says; what is added are narrow copies of
a product's operands. torchao's were run on PyTorch's CUDA build; TransformerEngine's are read from
its source, and no run confirms them here, which the result says.

Sources: torchao 0.18, ``float8/float8_linear.py``, ``float8_training_tensor.py`` and ``config.py``;
TransformerEngine d0067d0, ``pytorch/module/linear.py``, ``tensor/mxfp8_tensor.py`` and
``tensor/nvfp4_tensor.py``; 2.11, ``tensor/float8_blockwise_tensor.py``. Adding a recipe is adding a row.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass


class Fp8Recipe(Enum):
    """Recipes by the names the command line takes."""

    NONE = "none"
    TENSORWISE = "torchao-tensorwise"
    ROWWISE = "torchao-rowwise"
    ROWWISE_HIGH_PRECISION = "torchao-rowwise-with-gw-hp"
    DELAYED = "te-delayed"
    CURRENT = "te-current"
    BLOCKWISE = "te-blockwise"
    MXFP8 = "te-mxfp8"
    NVFP4 = "te-nvfp4"

    __hash__ = object.__hash__


class Fp8Package(Enum):
    """Whose linear layers multiply."""

    TORCHAO = "torchao"
    """Keeps what an ordinary linear layer keeps, and casts it again in backward."""
    TRANSFORMER_ENGINE = "TransformerEngine"
    """Keeps narrow copies in place of the input, and of the weight beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Formats:
    """One recipe."""

    package: Fp8Package
    code_bits: int = 8
    """Of one element."""
    block: int | None = None
    """Elements of one row, or column, that share a scale of a byte; None: a scale for all, or for a
    whole row."""
    scale_bytes: int = 1
    """Of a block's scale."""
    scales_first: bool = False
    """The largest value is looked for before anything is narrowed: what is narrowed is read twice."""
    by_direction: bool = False
    """A copy with scales along rows and one along columns differ on every card; where they do not,
    only cards before compute capability 10 need the second one, which is a transpose."""
    high_precision_weight_gradient: bool = False
    """The product that makes the weight's gradient is left in 16 bits."""
    least_capability: tuple[int, int] = (8, 9)
    """Compute capability of the first cards that multiply so."""

    @property
    def converts_head(self) -> bool:
        """Whether the output matrix is replaced as every other linear layer is: torchao's recipes leave it as it is (torchtitan's ``filter_fqns``)."""
        return self.package is Fp8Package.TRANSFORMER_ENGINE


FP8_RECIPES: dict[Fp8Recipe, Fp8Formats] = {
    Fp8Recipe.TENSORWISE: Fp8Formats(package=Fp8Package.TORCHAO),
    Fp8Recipe.ROWWISE: Fp8Formats(package=Fp8Package.TORCHAO),
    Fp8Recipe.ROWWISE_HIGH_PRECISION: Fp8Formats(
        package=Fp8Package.TORCHAO, high_precision_weight_gradient=True
    ),
    # accelerate 1.15 replaces every nn.Linear whose sizes are multiples of 16 (transformer_engine.py).
    Fp8Recipe.DELAYED: Fp8Formats(package=Fp8Package.TRANSFORMER_ENGINE),
    Fp8Recipe.CURRENT: Fp8Formats(package=Fp8Package.TRANSFORMER_ENGINE, scales_first=True),
    # Rows of 128, of weights squares of 128 by 128, with fp32 scales (common/recipe/__init__.py, ``Float8BlockScaling``).
    Fp8Recipe.BLOCKWISE: Fp8Formats(
        package=Fp8Package.TRANSFORMER_ENGINE,
        block=128,
        scale_bytes=4,
        by_direction=True,
        least_capability=(9, 0),
    ),
    Fp8Recipe.MXFP8: Fp8Formats(
        package=Fp8Package.TRANSFORMER_ENGINE,
        block=32,
        by_direction=True,
        least_capability=(10, 0),
    ),
    Fp8Recipe.NVFP4: Fp8Formats(
        package=Fp8Package.TRANSFORMER_ENGINE,
        code_bits=4,
        block=16,
        by_direction=True,
        least_capability=(10, 0),
    ),
}
"""Every recipe but none."""

SIZE_MULTIPLE = 16
"""Both sizes of a matrix have to be multiples of it to be replaced (``module_filter_fn`` of torchtitan,
``convert_model`` of accelerate)."""
