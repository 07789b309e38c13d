"""The optimizers that torch itself has, and bitsandbytes' where it is installed."""

from collections.abc import Iterable
from typing import Any

import torch

from memplan.errors import SetupError
from memplan.training.optimizers import Optimizer
from memplan.training.setup import TrainingSetup

LEARNING_RATE = 1e-5

_TORCH: dict[Optimizer, tuple[str, dict[str, object]]] = {
    Optimizer.ADAMW_FUSED: ("AdamW", {"fused": True}),
    Optimizer.ADAMW_FOREACH: ("AdamW", {"foreach": True}),
    Optimizer.ADAMW_LOOP: ("AdamW", {"foreach": False}),
    Optimizer.SGD: ("SGD", {"foreach": True}),
    Optimizer.SGD_MOMENTUM: ("SGD", {"foreach": True, "momentum": 0.9}),
    Optimizer.ADAGRAD: ("Adagrad", {"foreach": True}),
    Optimizer.RMSPROP: ("RMSprop", {"foreach": True}),
    Optimizer.NADAM: ("NAdam", {"foreach": True}),
    Optimizer.RADAM: ("RAdam", {"foreach": True}),
}
"""Class of ``torch.optim``, and in which form it runs on a GPU by itself."""
_BITSANDBYTES = {
    Optimizer.BNB_ADAMW: "AdamW32bit",
    Optimizer.BNB_ADAMW_8BIT: "AdamW8bit",
    Optimizer.BNB_PAGED_ADAMW: "PagedAdamW32bit",
    Optimizer.BNB_PAGED_ADAMW_8BIT: "PagedAdamW8bit",
    Optimizer.BNB_LION: "Lion32bit",
    Optimizer.BNB_LION_8BIT: "Lion8bit",
}


def optimizer_of(setup: TrainingSetup, parameters: Iterable[Any], *, has_gpu: bool) -> Any:
    """The setup's optimizer over what is trained.

    Raises ``SetupError`` for one that is not run here.
    """
    trained = [each for each in parameters if each.requires_grad]
    options: dict[str, Any] = dict(setup.optimizer_options)
    if setup.optimizer in _TORCH:
        name, form = _TORCH[setup.optimizer]
        return getattr(torch.optim, name)(trained, lr=LEARNING_RATE, **form, **options)
    if setup.optimizer in _BITSANDBYTES and has_gpu:
        try:
            import bitsandbytes
        except ImportError:
            msg = f"optimizer: {setup.optimizer.value} takes bitsandbytes: pip install bitsandbytes"
            raise SetupError(msg) from None
        return getattr(bitsandbytes.optim, _BITSANDBYTES[setup.optimizer])(
            trained, lr=LEARNING_RATE, **options
        )
    known = [*_TORCH, *(_BITSANDBYTES if has_gpu else ())]
    names = ", ".join(each.value for each in known)
    where = "" if has_gpu or setup.optimizer not in _BITSANDBYTES else " without a GPU"
    msg = f"optimizer: verify does not run {setup.optimizer.value}{where}; it runs {names}"
    raise SetupError(msg)
