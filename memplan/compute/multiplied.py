"""How long one product of a tape takes: its shape in its format, on a GPU's rates."""

from memplan.compute.narrow import NarrowTimes
from memplan.compute.product_shapes import second_operand
from memplan.compute.products import Shape, alignment_share, product_seconds
from memplan.compute.rates import Rates
from memplan.dtypes import DType
from memplan.graph.core.segments import Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter

FUSED_GRADIENT_BYTES = 8
"""Of a weight's gradient, what Megatron's products read and write as they add to the fp32 one (``gradient_accumulation_fusion``)."""


class ProductTimes:
    """Of one tape's products."""

    def __init__(self, tape: Tape, rates: Rates, narrow: NarrowTimes) -> None:
        self.rates = rates
        self.narrow = narrow
        self.is_megatron = tape.options.megatron is not None

    def seconds(
        self, operation: Operation, shape: Shape, *, back: bool = False, sums_rows: bool = False
    ) -> float:
        """How long a product takes; ``back``: it makes a gradient; ``sums_rows``: over tokens, which lie row by row (of a weight's
        gradient), so that their number does not cut rows short."""
        rates, first = self.rates, operation.inputs[0]
        is_narrow = self.narrow.is_narrow(operation)
        dtype = DType.FP8 if is_narrow else first.dtype
        made = first.dtype.num_bytes if is_narrow else 0
        if sums_rows and self.is_megatron:
            made = FUSED_GRADIENT_BYTES
        rate = rates.rate_of(dtype) / (rates.narrow_back if is_narrow and back else 1.0)
        if dtype is not DType.FP32 and shape.batch == 1:
            rate *= alignment_share(shape.n, shape.m if sums_rows else shape.k)
        in_turn = shape.batch if self._has_product_each(operation) else 1
        return rates.kernel_s + in_turn * product_seconds(
            shape if in_turn == 1 else shape._replace(batch=1),
            dtype.num_bytes,
            rate,
            rates.bytes_per_s,
            rates.num_multiprocessors,
            made,
        )

    def _has_product_each(self, operation: Operation) -> bool:
        """Whether each expert's product is a kernel of its own, which shares no wave with another's.

        TransformerEngine's grouped products are so many of cuBLAS, dealt to a few streams, so that no gap is between them: of
        108 measured on a B200 they take 12 % more or less in the median, as one kernel 20 to 28 % more than said (SimuMax 1.2,
        configs/system/b200_bf16_ceperm.json, ``group_matmul``).
        """
        if not self.is_megatron:
            return False
        weight = second_operand(operation)
        return isinstance(weight, Parameter) and weight.experts is not None
