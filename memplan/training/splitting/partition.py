"""How DeepSpeed's ``PipelineModule`` deals layers to stages.

(DeepSpeed 0.19.8, runtime/pipe/module.py, ``_partition_layers``; runtime/utils.py)
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from memplan.errors import SetupError

DEFAULT_METHOD = "parameters"
_TYPE = "type:"


def check_method(method: object) -> str:
    """The method as it is given, if DeepSpeed has it.

    Raises ``SetupError``.

    >>> check_method("type:decoder")
    'type:decoder'
    """
    known = isinstance(method, str) and (
        method.lower() in ("uniform", "parameters") or method.lower().startswith(_TYPE)
    )
    if not known:
        msg = (
            "engine_options: partition_method: expected uniform, parameters or type: with a pattern of "
            f"class names, got {method!r:.60}"
        )
        raise SetupError(msg)
    assert isinstance(method, str)
    return method


def stage_bounds(
    method: str, *, numels: Sequence[int], names: Sequence[str], num_stages: int
) -> tuple[int, ...]:
    """With which item each stage begins, and the number of items.

    ``numels`` and ``names``: the trained parameters of each item and its class. Raises ``SetupError`` for
    a pattern that no class is called by.

    >>> stage_bounds("uniform", numels=[9, 4, 4, 4, 4, 0, 9], names=[""] * 7, num_stages=2)
    (0, 4, 7)
    >>> stage_bounds("parameters", numels=[9, 4, 4, 4, 4, 0, 9], names=[""] * 7, num_stages=2)
    (0, 3, 7)
    """
    kind = method.lower()
    if kind == "uniform":
        return _uniform(len(numels), num_stages)
    weights = tuple(numels)
    if kind.startswith(_TYPE):
        pattern = kind.split(":")[1]
        weights = tuple(int(bool(re.search(pattern, name, re.IGNORECASE))) for name in names)
        if not any(weights):
            msg = (
                f"engine_options: partition_method: no layer's class has {pattern!r} in its name; there are "
                f"{', '.join(dict.fromkeys(names))}"
            )
            raise SetupError(msg)
    return _balanced(weights, num_stages)


def _uniform(num_items: int, num_parts: int) -> tuple[int, ...]:
    """``partition_uniform``: what is left over goes to the first ones."""
    if num_items <= num_parts:
        return tuple(min(part, num_items) for part in range(num_parts + 1))
    size, rest = divmod(num_items, num_parts)
    return tuple(part * size + min(part, rest) for part in range(num_parts + 1))


@lru_cache(maxsize=64)
def _balanced(weights: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    """``partition_balanced``: the least difference between the heaviest part and the lightest; of equal
    ones the last cut that is looked at."""
    count = len(weights)
    if count <= num_parts:
        return _uniform(count, num_parts)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    infinite = float("inf")
    heaviest: list[float] = [0.0, *[infinite] * count]
    lightest: list[float] = [infinite] * (count + 1)
    cuts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        heavier, lighter = [infinite] * (count + 1), [infinite] * (count + 1)
        cut = [0] * (count + 1)
        for stop in range(part, count + 1):
            least = infinite
            for start in range(stop):
                own = sums[stop] - sums[start]
                most, fewest = max(heaviest[start], own), min(lightest[start], own)
                if least >= most - fewest:
                    least, cut[stop] = most - fewest, start
                    heavier[stop], lighter[stop] = most, fewest
        cuts.append(cut)
        heaviest, lightest = heavier, lighter
    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(reversed(bounds))
