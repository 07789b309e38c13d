"""An optimizer in memory by its class, as memplan's table has it.

Which of AdamW's three ways runs is read off its first group (torch 2.13, ``optim/adamw.py``: fused where that is set, a loop where
``foreach`` is denied, else all tensors at once).
"""

from typing import Any

from memplan.errors import UsageError, did_you_mean

_BY_CLASS = {
    "AdamW8bit": "bnb-adamw-8bit", "PagedAdamW": "bnb-paged-adamw", "PagedAdamW8bit": "bnb-paged-adamw-8bit",
    "PagedAdamW32bit": "bnb-paged-adamw", "AdamW32bit": "bnb-adamw", "Lion8bit": "bnb-lion-8bit", "PagedLion8bit": "bnb-paged-lion-8bit",
    "Adafactor": "adafactor", "Adagrad": "adagrad", "RMSprop": "rmsprop", "NAdam": "nadam", "RAdam": "radam", "Muon": "muon",
    "FusedAdam": "adamw-fused", "DeepSpeedCPUAdam": "adamw-fused",
}  # fmt: skip
"""Class -> memplan's name. bitsandbytes' Lion and AdamW in 32 bits are told from torch's by their module."""


def optimizer_fields(optimizer: Any) -> dict[str, Any]:
    """The field of a setup that an optimizer makes; none where there is no optimizer.

    ``optimizer`` may be memplan's name for one. Raises ``UsageError`` for a class that the table lacks.
    """
    if optimizer is None:
        return {}
    if isinstance(optimizer, str):
        return {"optimizer": optimizer}
    inner = getattr(optimizer, "optimizer", None)  # accelerate's and DeepSpeed's wrappers
    if inner is not None and hasattr(inner, "param_groups"):
        optimizer = inner
    return {"optimizer": _name(optimizer)}


def _name(optimizer: Any) -> str:
    kind = type(optimizer).__name__
    group: dict[str, Any] = next(iter(optimizer.param_groups), {})
    package = type(optimizer).__module__.partition(".")[0]
    if kind in ("Adam", "AdamW"):
        if package == "bitsandbytes":
            return "bnb-adamw"
        if group.get("fused"):
            return "adamw-fused"
        return "adamw-loop" if group.get("foreach") is False else "adamw-foreach"
    if kind == "SGD":
        return "sgd-momentum" if group.get("momentum") else "sgd"
    if kind == "Lion":
        return "bnb-lion" if package == "bitsandbytes" else "lion"
    if kind not in _BY_CLASS:
        hint = did_you_mean(kind, tuple(_BY_CLASS))
        msg = f"optimizer: {kind} is none that is known here.{hint} Give its name in memplan instead, optimizer='adamw-fused'"
        raise UsageError(msg)
    return _BY_CLASS[kind]
