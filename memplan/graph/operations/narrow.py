"""TransformerEngine's products in 8 bits: what their modules quantize, keep, gather and multiply.

Megatron-core hands TransformerEngine's modules a recipe (``--fp8-format``, ``--fp8-recipe``; core/fp8_utils.py) for its layers; the embedding,
the router and the output matrix are modules of its own and stay in 16 bits, attention does unless ``fp8_dot_product_attention`` is on.

* The input is quantized, by the norm's own kernel where a norm stands before it and the scale is known (``delayed``), and kept as codes in
  place of itself: those by column, which the weight's gradient is multiplied of, or those by row where its share of the tokens is gathered
  again in backward (pytorch/module/linear.py, layernorm_linear.py of TransformerEngine 2.11; both copies before compute capability 10).
* What tensor-parallel ranks gather are codes, half the bytes of 16 bits; sums stay in 16 bits (``gather_along_first_dim``).
* A weight's codes, by row and by column, are made in the first micro-batch of a step and stay (``is_first_microbatch``, base.py,
  ``get_weight_workspace``).
* Backward the gradient of the result is quantized both ways, then both products are of codes.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter, Tensor
from memplan.graph.fp8 import code_bytes
from memplan.graph.operations.megatron import sizes_of, weight_gradient
from memplan.training.choices_of_kernels.fp8 import (
    FP8_RECIPES,
    SIZE_MULTIPLE,
    Fp8Formats,
    Fp8Recipe,
)
from memplan.training.splitting.exchange import NO_SENDS, ExchangeKind, Send, Sends
from memplan.units import round_up


def narrow_formats(t: Tape) -> Fp8Formats | None:
    """The recipe of TransformerEngine's products; None where they are of 16 bits."""
    recipe = t.options.fp8
    return None if recipe is Fp8Recipe.NONE else FP8_RECIPES[recipe]


class Narrow:
    """One product in 8 bits of a rank's part of a weight."""

    def __init__(self, t: Tape, formats: Fp8Formats, weight: Parameter) -> None:
        self.t = t
        self.formats = formats
        self.columns, self.width = sizes_of(weight)
        _check_sizes(weight, self.columns, self.width)
        self.both = formats.by_direction or t.options.fp8_transposes
        """A copy by row and one by column are two."""
        self.copies = (False, True) if self.both else (False,)
        weight.codes_bytes = (
            weight.shape[0]
            // self.columns
            * sum(
                code_bytes(formats, self.columns, self.width, by_column=each, is_weight=True)
                for each in self.copies
            )
        )

    def kept(self, rows: int, *, again: bool = False) -> Tensor:
        """The input's codes as backward reads them; ``again``: they are gathered once more there."""
        by_column = self.both and (self.formats.by_direction or not again)
        size = code_bytes(self.formats, rows, self.width, by_column=by_column)
        return self.t.tensor(size, DType.FP8)

    def quantized(self, rows: int, *, again: bool = False) -> list[int]:
        """Codes that forward alone reads, beside those that are kept."""
        is_apart = self.both and (self.formats.by_direction or not again)
        return self._blocks([code_bytes(self.formats, rows, self.width)] * is_apart)

    def gathered(self, rows: int) -> list[int]:
        """The input's codes of all ranks' tokens."""
        return self._blocks([code_bytes(self.formats, rows, self.width)])

    def gathered_back(self, rows: int) -> list[int]:
        """The same in backward, which cards before compute capability 10 turn."""
        by_direction = self.formats.by_direction
        size = code_bytes(self.formats, rows, self.width, by_column=by_direction)
        return self._blocks([size] * (1 + (self.both and not by_direction)))

    def gradient(self, rows: int) -> list[int]:
        """The result's gradient, quantized both ways."""
        return self._blocks(
            [code_bytes(self.formats, rows, self.columns, by_column=each) for each in self.copies]
        )

    @staticmethod
    def _blocks(sizes: Sequence[int]) -> list[int]:
        return [round_up(each, ALLOCATION_ROUNDING) for each in sizes]


def _check_sizes(weight: Parameter, *sizes: int) -> None:
    for size in sizes:
        if size % SIZE_MULTIPLE:
            msg = (
                f"fp8: TransformerEngine multiplies 8 bits in multiples of {SIZE_MULTIPLE}, and {weight.name} has {size} "
                "on each rank: leave fp8 out, or take another tensor_parallel"
            )
            raise SetupError(msg)


def narrow_product(
    t: Tape,
    formats: Fp8Formats,
    x: Tensor,
    weight: Parameter,
    rows: int,
    *,
    forward: Sequence[int] = (),
    backward: Sequence[int] = (),
    sends: Sends = NO_SENDS,
    gathered_rows: int = 0,
) -> Tensor:
    """A product with so many rows that keeps its input's codes; ``gathered_rows``: of the input that all ranks have together.

    ``forward`` and ``backward`` are blocks of 16 bits that come behind the codes.
    """
    narrow = Narrow(t, formats, weight)
    own = x.numel // narrow.width
    is_gathered = gathered_rows > 0
    kept = narrow.kept(own, again=is_gathered)
    out = t.tensor(rows * narrow.columns, t.compute)
    came = narrow.gathered(gathered_rows) if is_gathered else []
    back = narrow.gathered_back(gathered_rows) if is_gathered else []
    first = (*narrow.quantized(own, again=is_gathered), *came, *forward)
    multiplied = max(own, rows)
    t.record(
        OperationKind.LINEAR, (x, weight), (kept, out), saves=(kept, weight),
        gradients=(Gradient.FRESH, weight_gradient(t)),
        forward_scratch_bytes=(*first, RESULT) if first else (),
        backward_scratch_bytes=(*narrow.gradient(multiplied), *back, *backward, RESULT),
        flops=2 * multiplied * narrow.width * narrow.columns, in_python=True,
        sends=narrow_sends(t, formats, sends),
    )  # fmt: skip
    return out


def narrow_sends(t: Tape, formats: Fp8Formats, sends: Sends) -> Sends:
    """The same with what is gathered in codes and their scales; sums stay in 16 bits."""
    of = 1024 * formats.code_bits  # a row that every block divides
    narrow = code_bytes(formats, 128, of) / (128 * of * t.compute.num_bytes)

    def told(each: Send) -> Send:
        if each.kind is not ExchangeKind.ALL_GATHER:
            return each
        return each._replace(num_bytes=int(each.num_bytes * narrow))

    return Sends(tuple(map(told, sends.forward)), tuple(map(told, sends.backward)))
