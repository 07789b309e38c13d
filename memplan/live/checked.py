"""What was found of a training that is about to start."""

from typing import TYPE_CHECKING

from memplan.errors import MemplanError
from memplan.fast_dataclass import dataclass
from memplan.units import GIB

if TYPE_CHECKING:
    from memplan.estimator import Estimate, Verdict

ARGUMENTS = {
    "batch_size": "per_device_train_batch_size", "gradient_accumulation": "gradient_accumulation_steps",
    "checkpointing full": "gradient_checkpointing=True", "seq_len": "max_length", "optimizer": "optim",
    "kernels liger": "use_liger_kernel=True",
}  # fmt: skip
"""memplan's words -> those of ``TrainingArguments``."""


class ForeseenOutOfMemoryError(MemplanError):
    """A training that would not fit its card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The estimate of the training at hand, and what to change where it does not fit."""

    estimate: "Estimate"
    remarks: tuple[str, ...] = ()
    """What was taken for granted, or could not be read."""
    is_trainer: bool = False
    """Whether advice is given in the words of ``TrainingArguments``."""

    @property
    def verdict(self) -> "Verdict | None":
        """*fits*, *tight* or *OOM*; None where no card is here and none was named."""
        return self.estimate.verdict

    @property
    def allocated_bytes(self) -> int:
        """The run's peak as ``torch.cuda.max_memory_allocated`` counts it: whole blocks, with what is left of each [bytes]."""
        return self.estimate.run.peaks.allocated_bytes

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it would die."""
        return self.verdict is not None and self.verdict.value == "OOM"

    @property
    def advice(self) -> tuple[str, ...]:
        """What would make it fit, each in a line; looked for when it is asked for."""
        return tuple(self._words(hint.text) for hint in self.estimate.hints())

    def _words(self, text: str) -> str:
        if self.is_trainer:
            for word, argument in ARGUMENTS.items():
                text = text.replace(word, argument)
        return text

    @property
    def headline(self) -> str:
        """``H100-80: fits, needs 37.1-39.4 of 79.2 GiB``."""
        answer = self.estimate
        total = answer.total_bytes
        needs = f"needs {total.low / GIB:.1f}-{total.high / GIB:.1f}"
        if answer.gpu is None:
            return f"no card: {needs} GiB of each"
        capacity = f"{answer.gpu.capacity_bytes / GIB:.1f} GiB"
        words = "does not fit" if self.is_out_of_memory else str(answer.verdict)
        return f"{answer.gpu.short_name}: {words}, {needs} of {capacity}"

    def __str__(self) -> str:
        answer = self.estimate
        lines = [
            f"memplan: {self.headline}; peak allocated {self.allocated_bytes / GIB:.2f} GiB in {answer.peak_phase}",
            *(f"memplan: {each}" for each in self.remarks),
        ]
        if self.is_out_of_memory:
            lines += [f"memplan: {each}" for each in self.advice]
        return "\n".join(lines)
