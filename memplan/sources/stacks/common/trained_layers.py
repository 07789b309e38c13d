"""Freeze tuning: layers, and modules in and beside them, that alone are trained.

LLaMA-Factory ff6d4d12, ``model/adapter.py`` (``_setup_freeze_tuning``) and ``v1/plugins/model_plugins/peft.py``
(``get_freeze_model``): a parameter is trained whose name has one of their texts anywhere in it.
"""

import re
from collections.abc import Sequence

from memplan.training.freezing import ALL_BUT

_WHOLE = ("all",)


def trained_layers(
    count: int,
    layers: int,
    *,
    modules: Sequence[str] = (),
    extra: Sequence[str] = (),
    spread: bool = False,
) -> str:
    """What ``freeze`` says: the last so many of ``count`` layers are trained, or below 0 the first; of them ``modules``,
    and ``extra`` ones beside them. ``spread``: each of them ends a block of layers (LLaMA Pro).

    >>> trained_layers(32, 2), trained_layers(32, -1)
    ('embeddings,norm,head,layers.0-29', 'embeddings,norm,head,layers.1-31')
    >>> trained_layers(4, 2, modules=["mlp"], extra=["lm_head"], spread=True)
    'all but .*[.]1[.]mlp .*[.]3[.]mlp .*lm_head'
    """
    whole = tuple(modules) in ((), _WHOLE)
    if whole and not extra and not spread:
        frozen = ["embeddings", "norm", "head"]
        if abs(layers) < count:
            rest = (0, count - layers - 1) if layers > 0 else (-layers, count - 1)
            frozen.append(f"layers.{rest[0]}-{rest[1]}")
        return ",".join(frozen)
    stride = count // layers if spread else 1
    numbers = range(stride - 1, count, stride) if spread else _ends(count, layers)
    named = [
        rf".*[.]{number}[.]{'' if name in _WHOLE else re.escape(name)}"
        for name in (modules or _WHOLE)
        for number in numbers
    ]
    return ALL_BUT + " ".join((*named, *(rf".*{re.escape(name)}" for name in extra)))


def _ends(count: int, layers: int) -> range:
    """Numbers of the last layers, or of the first."""
    return range(max(0, count - layers), count) if layers > 0 else range(min(-layers, count))
