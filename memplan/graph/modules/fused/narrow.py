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
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.graph.fp8 import code_bytes
from memplan.graph.modules.fused.megatron import FRESH, apply, weight_gradient
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.run import Run
from memplan.training.choices_of_kernels.fp8 import (
    FP8_RECIPES,
    SIZE_MULTIPLE,
    Fp8Formats,
    Fp8Recipe,
)
from memplan.training.splitting.exchange import NO_SENDS, ExchangeKind, Send, Sends
from memplan.units import round_up


def narrow_formats(run: Run) -> Fp8Formats | None:
    """The recipe of TransformerEngine's products; None where they are of 16 bits."""
    recipe = run.options.fp8
    return None if recipe is Fp8Recipe.NONE else FP8_RECIPES[recipe]


class Narrow:
    """One product in 8 bits of a rank's part of a weight."""

    def __init__(self, formats: Fp8Formats, weight: Handle) -> None:
        self.run, self.formats, record = weight.run, formats, weight.record
        assert isinstance(record, Parameter)
        self.columns, self.width = weight.shape[-2:]
        _check_sizes(record, self.columns, self.width)
        self.both = formats.by_direction or self.run.options.fp8_transposes
        """A copy by row and one by column are two."""
        self.copies = (False, True) if self.both else (False,)
        sizes = (
            self._codes(self.columns, self.width, each, is_weight=True) for each in self.copies
        )
        record.codes_bytes = record.shape[0] // self.columns * sum(sizes)

    def _codes(self, rows: int, width: int, by_column: bool, *, is_weight: bool = False) -> int:
        return code_bytes(self.formats, rows, width, by_column=by_column, is_weight=is_weight)

    def kept(self, rows: int, *, again: bool = False) -> Handle:
        """The input's codes as backward reads them; ``again``: they are gathered once more there."""
        by_column = self.both and (self.formats.by_direction or not again)
        return empty(self.run, (self._codes(rows, self.width, by_column),), DType.FP8)

    def quantized(self, rows: int, *, again: bool = False) -> list[int]:
        """Codes that forward alone reads, beside those that are kept."""
        is_apart = self.both and (self.formats.by_direction or not again)
        return self._blocks([self._codes(rows, self.width, by_column=False)] * is_apart)

    def gathered(self, rows: int) -> list[int]:
        """The input's codes of all ranks' tokens."""
        return self._blocks([self._codes(rows, self.width, by_column=False)])

    def gathered_back(self, rows: int) -> list[int]:
        """The same in backward, which cards before compute capability 10 turn."""
        by_direction = self.formats.by_direction
        size = self._codes(rows, self.width, by_direction)
        return self._blocks([size] * (1 + (self.both and not by_direction)))

    def gradient(self, rows: int) -> list[int]:
        """The result's gradient, quantized both ways."""
        return self._blocks([self._codes(rows, self.columns, each) for each in self.copies])

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
    formats: Fp8Formats,
    x: Handle,
    weight: Handle,
    length: int,
    *,
    forward: Sequence[int] = (),
    backward: Sequence[int] = (),
    sends: Sends = NO_SENDS,
    is_gathered: bool = False,
) -> Handle:
    """A product of so many tokens that keeps its input's codes, or those of its share of them.

    ``forward`` and ``backward`` are blocks of 16 bits that come behind the codes.
    """
    narrow, run = Narrow(formats, weight), x.run
    own = x.numel // narrow.width
    kept = narrow.kept(own, again=is_gathered)
    made = empty(run, (length, *x.shape[1:-1], narrow.columns), run.compute)
    rows = max(own, made.numel // narrow.columns)
    came, back = (
        ([], []) if not is_gathered else (narrow.gathered(rows), narrow.gathered_back(rows))
    )
    apply(
        OperationKind.LINEAR, [x, weight], [kept, made], [kept, weight],
        (FRESH, weight_gradient(run)),
        forward=[*narrow.quantized(own, again=is_gathered), *came, *forward],
        backward=[*narrow.gradient(rows), *back, *backward],
        flops=2 * rows * narrow.width * narrow.columns, sends=narrow_sends(run, formats, sends),
    )  # fmt: skip
    return made


def narrow_sends(run: Run, formats: Fp8Formats, sends: Sends) -> Sends:
    """The same with what is gathered in codes and their scales; sums stay in 16 bits."""
    of = 1024 * formats.code_bits  # a row that every block divides
    narrow = code_bytes(formats, 128, of) / (128 * of * run.compute.num_bytes)

    def told(each: Send) -> Send:
        if each.kind is not ExchangeKind.ALL_GATHER:
            return each
        return each._replace(num_bytes=int(each.num_bytes * narrow))

    return Sends(tuple(map(told, sends.forward)), tuple(map(told, sends.backward)))
