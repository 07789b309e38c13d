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


def narrow_blocks(
    formats: Fp8Formats, weight: Handle, own: int, rows: int, *, is_gathered: bool
) -> tuple[Handle, list[int], list[int]]:
    """Of one product of a rank's part of a weight: the input's codes as backward reads them, and blocks of both passes.

    A rank quantizes its ``own`` rows of the input; of all that are multiplied they are gathered, and in backward once more.
    """
    run, record, (columns, width) = weight.run, weight.record, weight.shape[-2:]
    assert isinstance(record, Parameter)
    _check_sizes(record, columns, width)
    by_direction = formats.by_direction
    # A copy by row and one by column are two.
    both = by_direction or run.options.fp8_transposes
    copies = (False, True) if both else (False,)
    sizes = (code_bytes(formats, columns, width, by_column=each, is_weight=True) for each in copies)
    record.codes_bytes = record.shape[0] // columns * sum(sizes)
    is_apart = both and (by_direction or not is_gathered)
    kept = empty(run, (code_bytes(formats, own, width, by_column=is_apart),), DType.FP8)
    # What forward alone reads.
    forward = [code_bytes(formats, own, width)] * is_apart
    # The result's gradient, quantized both ways.
    backward = [code_bytes(formats, rows, columns, by_column=each) for each in copies]
    if is_gathered:
        forward.append(code_bytes(formats, rows, width))
        # Cards before compute capability 10 turn it.
        again = code_bytes(formats, rows, width, by_column=by_direction)
        backward += [again] * (1 + (both and not by_direction))
    forward, backward = (
        [round_up(each, ALLOCATION_ROUNDING) for each in some] for some in (forward, backward)
    )
    return kept, forward, backward


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
    run, (columns, width) = x.run, weight.shape[-2:]
    made = empty(run, (length, *x.shape[1:-1], columns), run.compute)
    own = x.numel // width
    rows = max(own, made.numel // columns)
    kept, first, codes = narrow_blocks(formats, weight, own, rows, is_gathered=is_gathered)
    apply(
        OperationKind.LINEAR, [x, weight], [kept, made], [kept, weight],
        (FRESH, weight_gradient(run)), forward=[*first, *forward], backward=[*codes, *backward],
        flops=2 * rows * width * columns, sends=narrow_sends(run, formats, sends),
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
