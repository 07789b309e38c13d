"""An exponential moving average of the weights (``torch.optim.swa_utils.AveragedModel``)."""

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.text import shown

_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}
_PLACES = ("gpu", "cpu")
AS_WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ema:
    """A copy of what a rank keeps of each weight.

    >>> str(Ema.read("fp32@cpu")), str(Ema.read("weights"))
    ('fp32@cpu', 'weights')
    """

    dtype: DType | None = None
    """None: the weights' own."""
    on_cpu: bool = False
    """It lies in CPU RAM."""

    @classmethod
    def read(cls, value: object) -> "Ema | None":
        """An average out of ``weights``, ``fp32``, ``bf16`` or ``fp16``, with ``@cpu`` where it lies there.

        Raises ``SetupError`` for anything else.
        """
        if value is None or isinstance(value, Ema):
            return value
        text = AS_WEIGHTS if value is True else value
        dtype, _, place = text.partition("@") if isinstance(text, str) else ("", "", "")
        if place not in ("", *_PLACES) or dtype not in (AS_WEIGHTS, *_DTYPES):
            known = (AS_WEIGHTS, *_DTYPES)
            hint = did_you_mean(dtype, known) if dtype else ""
            msg = (
                f"ema: {shown(value)} is not one of {', '.join(known)}, with @cpu behind it where the "
                f"average lies in CPU RAM.{hint}"
            )
            raise SetupError(msg)
        return cls(dtype=_DTYPES.get(dtype), on_cpu=place == "cpu")

    def __str__(self) -> str:
        text = AS_WEIGHTS if self.dtype is None else self.dtype.label
        return f"{text}@cpu" if self.on_cpu else text
