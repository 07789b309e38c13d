"""Evaluation between steps, as transformers' Trainer does it (``Trainer.evaluation_loop``): pure data."""

from collections.abc import Mapping

from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass, fields
from memplan.text import shown

MAX_COUNT = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Batches without gradients between two steps.

    >>> Evaluation.read(8)
    Evaluation(batch_size=8, batches_kept=0, accumulation_steps=None, seq_len=None)
    >>> str(Evaluation.read("8:accumulation_steps=4")), Evaluation.read("8:accumulation_steps=4").num_kept
    ('8:accumulation_steps=4', 0)
    >>> Evaluation.read({"batch_size": 8, "batches_kept": 9, "accumulation_steps": 4}).num_kept
    4
    """

    batch_size: int
    """Sequences of one of them on a data-parallel rank (``per_device_eval_batch_size``)."""
    batches_kept: int = 0
    """Batches whose logits are kept on the GPU, for metrics, gathered from all ranks; 0: the loss alone
    (``prediction_loss_only``, or no ``compute_metrics``)."""
    accumulation_steps: int | None = None
    """Batches after which they go to the CPU, and the cache is emptied (``eval_accumulation_steps``).
    None: when all are through."""
    seq_len: int | None = None
    """Tokens of each sequence (torchtitan's ``validation.seq_len``). None: as many as a step's."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPEN:
                continue
            if value.__class__ is not int or not least <= value <= MAX_COUNT:
                msg = f"evaluation: {name}: must be a whole number from {least} up, got {shown(value)}"
                raise SetupError(msg)

    @classmethod
    def read(cls, value: object) -> "Evaluation | None":
        """An evaluation out of a batch's size, ``8:batches_kept=4``, a mapping, or one itself.

        Raises ``SetupError`` for settings that do not exist or cannot be.
        """
        if value is None or isinstance(value, Evaluation):
            return value
        given: dict[str, object]
        if isinstance(value, Mapping):
            given = dict(value)
        elif isinstance(value, str):
            given = _parts(value)
        else:
            given = {"batch_size": value}
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                hint = did_you_mean(str(name), names)
                msg = f"evaluation: {shown(name)}: no such setting.{hint} There are: {', '.join(names)}"
                raise SetupError(msg)
        if given.get("batch_size") is None:
            msg = "evaluation: batch_size: is missing: how many sequences a batch has"
            raise SetupError(msg)
        return cls(**{name: each for name, each in given.items() if each is not None})  # type: ignore[arg-type]

    @property
    def num_kept(self) -> int:
        """Batches whose logits are on the GPU at the most."""
        if self.accumulation_steps is None:
            return self.batches_kept
        return min(self.batches_kept, self.accumulation_steps)

    def __str__(self) -> str:
        parts = [
            f"{each.name}={value}"
            for each in fields(self)[1:]
            if (value := getattr(self, each.name)) != each.default
        ]
        return f"{self.batch_size}:{','.join(parts)}" if parts else str(self.batch_size)


_LEAST = {"batch_size": 1, "batches_kept": 0, "accumulation_steps": 1, "seq_len": 1}
_OPEN = frozenset({"accumulation_steps", "seq_len"})
"""May be left open."""


def _parts(text: str) -> dict[str, object]:
    size, _, rest = text.partition(":")
    found: dict[str, object] = {"batch_size": _number(size)}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        found[name.strip()] = _number(value)
    return found


def _number(text: str) -> object:
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) < 20 else text
