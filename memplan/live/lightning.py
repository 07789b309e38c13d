"""Lightning's Trainer as a loop: its module, optimizer, precision and data (Lightning 2.6, ``trainer/trainer.py``, ``plugins/precision``)."""

from typing import Any

from memplan.errors import UsageError
from memplan.fast_dataclass import dataclass
from memplan.live.data import longest
from memplan.live.model import wrappers

PRECISIONS = {"bf16-mixed": "bf16-amp", "16-mixed": "fp16-amp"}
"""Lightning's names for autocast -> memplan's; ``-true`` casts the weights, whose format is read off them."""
OWN_GRADIENTS = ("DeepSpeedEngine", "FullyShardedDataParallel")
"""Wrappers that keep gradients in their own way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningRun:
    """What a Trainer of Lightning's holds."""

    model: Any
    """As its strategy has wrapped it."""
    optimizer: Any
    precision: str | None
    sequences: int
    tokens: int | None
    """The longest of the first examples; None where they do not say."""
    accumulation: int
    num_gpus: int
    holds_gradients: bool
    """Those of a step are there until the next forward pass is over: its loop has them, not an engine."""


def is_lightning(trained: Any) -> bool:
    """Whether it is Lightning's Trainer."""
    return any(
        each.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        and each.__name__ == "Trainer"
        for each in type(trained).__mro__
    )


def lightning_run(trainer: Any) -> LightningRun:
    """Look at a Trainer that has set up its strategy: from ``on_train_start`` on, or after ``fit``.

    Raises ``UsageError`` for one that has not.
    """
    optimizers = list(getattr(trainer, "optimizers", ()) or ())
    model = getattr(trainer.strategy, "model", None)
    if model is None or not optimizers:
        msg = "Lightning's Trainer has no optimizer yet: check it in a callback's on_train_start"
        raise UsageError(msg)
    loader = trainer.train_dataloader
    return LightningRun(
        model=model,
        optimizer=optimizers[0],
        precision=PRECISIONS.get(str(trainer.precision)),
        sequences=int(getattr(loader, "batch_size", None) or 1),
        tokens=longest(getattr(loader, "dataset", None)),
        accumulation=int(trainer.accumulate_grad_batches),
        num_gpus=int(trainer.world_size),
        holds_gradients=not any(type(each).__name__ in OWN_GRADIENTS for each in wrappers(model)),
    )
