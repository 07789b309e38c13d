"""Low-rank adapters as peft lays them over a model."""

from typing import Any

import torch

from memplan.errors import UsageError
from memplan.training.adapters import AdapterDtype, Lora

HALVES = {AdapterDtype.BF16: torch.bfloat16, AdapterDtype.FP16: torch.float16}
PEFT_ALPHA = 8
"""peft's own."""


def adapted(model: Any, adapter: Lora) -> Any:
    """The model with its weights frozen, and adapters beside them.

    Raises ``UsageError`` where peft is not installed.
    """
    try:
        import peft
    except ImportError:
        msg = "adapter: LoRA takes peft: pip install peft"
        raise UsageError(msg) from None
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=PEFT_ALPHA if adapter.alpha is None else adapter.alpha,
        target_modules=_list_or_text(adapter.targets),
        exclude_modules=_list_or_text(adapter.exclude) or None,
        target_parameters=list(adapter.parameters) or None,
        layers_to_transform=list(adapter.layers) or None,
        rank_pattern=dict(adapter.rank_pattern),
        lora_dropout=adapter.dropout,
        bias=adapter.bias.value,
        lora_bias=adapter.lora_bias,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        modules_to_save=list(adapter.modules_to_save) or None,
        init_lora_weights=False,
    )
    with torch.device("meta"):
        made = peft.get_peft_model(model, config)
    if adapter.dtype is not AdapterDtype.FP32:
        # What autocast_adapter_dtype=False leaves them in, had the base a place.
        for each in made.parameters():
            if each.requires_grad:
                each.data = each.data.to(HALVES[adapter.dtype])
    return made


def _list_or_text(names: tuple[str, ...] | str | None) -> list[str] | str | None:
    return list(names) if isinstance(names, tuple) else names
