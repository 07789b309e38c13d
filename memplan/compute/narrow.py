"""What products of 8 bits take beside multiplying: their codes are made, in either direction.

TransformerEngine's modules quantize what they multiply; torchao's multiply what they are given.
"""

from collections.abc import Sequence

from memplan.compute.host import CPU_PRICES
from memplan.compute.product_shapes import has_norm, second_operand
from memplan.compute.rates import Rates
from memplan.compute.traffic import num_bytes_of
from memplan.compute.work import Work
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Operation
from memplan.graph.core.tape import Tape
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Package
from memplan.training.splitting.exchange import ExchangeKind, Send


class NarrowTimes:
    """Of one tape's products."""

    def __init__(self, tape: Tape, rates: Rates) -> None:
        self.tape = tape
        self.rates = rates
        self.formats = FP8_RECIPES.get(tape.options.fp8)
        """Of narrow products; None: there are none."""

    def is_narrow(self, operation: Operation) -> bool:
        """Whether it multiplies codes of 8 bits."""
        formats = self.formats
        if formats is None:
            return False
        if operation.inputs[0].dtype is DType.FP8 or self.quantizes(operation):
            return True
        is_own = formats.package is Fp8Package.TORCHAO
        return is_own and operation.in_python and operation.kind is OperationKind.LINEAR

    def quantizes(self, operation: Operation) -> bool:
        """Whether a module of TransformerEngine's makes the codes that it multiplies: they are what it keeps."""
        if self.formats is None or operation.kind is not OperationKind.LINEAR:
            return False
        return operation.outputs[0].dtype is DType.FP8

    def quantize(self, work: Work, operation: Operation) -> None:
        """What is narrowed is read and its codes are written; a norm whose scale is known writes them in place of 16 bits."""
        formats = self.formats
        if formats is None or not self.quantizes(operation):
            return
        x, (kept, *others) = operation.inputs[0], [
            each for each in operation.outputs if each.dtype is DType.FP8
        ]  # fmt: skip
        moved = num_bytes_of(kept) * self._num_copies(operation.sends.forward)
        if not has_norm(operation) or formats.scales_first:
            moved += num_bytes_of(x) * (1 + formats.scales_first)
        else:
            moved -= num_bytes_of(x)
        for each in others:
            moved += num_bytes_of(second_operand(operation)) + num_bytes_of(each)
        work.memory_s += moved / self.rates.bytes_per_s + self.rates.kernel_s * len(others)
        if not has_norm(operation):
            work.memory_s += self.rates.kernel_s
            work.host_s += CPU_PRICES.kernel

    def quantize_back(self, work: Work, operation: Operation) -> None:
        """The result's gradient, and what is gathered by row and multiplied by column."""
        formats = self.formats
        if formats is None or not self.quantizes(operation):
            return
        gradient = operation.outputs[-1]
        codes = gradient.numel * formats.code_bits // 8
        copies = 2 if self._has_two_copies else 1
        moved = num_bytes_of(gradient) * (1 + formats.scales_first) + copies * codes
        if self._has_two_copies and not formats.by_direction:
            moved += 2 * sum(
                each.num_bytes
                for each in operation.sends.backward
                if each.kind is ExchangeKind.ALL_GATHER
            )
        weight = second_operand(operation)
        if self.tape.options.casts_weights_again:
            moved += num_bytes_of(weight) + copies * weight.numel * formats.code_bits // 8
        work.memory_s += moved / self.rates.bytes_per_s + self.rates.kernel_s
        work.host_s += CPU_PRICES.kernel

    @property
    def _has_two_copies(self) -> bool:
        return bool(self.formats and self.formats.by_direction) or self.tape.options.fp8_transposes

    def _num_copies(self, sends: Sequence[Send]) -> int:
        """Of an input's codes: those by column come with those by row, but where only these are gathered."""
        is_gathered = any(each.kind is ExchangeKind.ALL_GATHER for each in sends)
        by_direction = self.formats is not None and self.formats.by_direction
        return 2 if by_direction or (self._has_two_copies and not is_gathered) else 1
