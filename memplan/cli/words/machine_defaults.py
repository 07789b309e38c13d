"""Values that the user's own configuration has of options that are not typed."""

import os
from collections.abc import Sequence
from typing import Any


def machine_defaults(command: Any, args: Sequence[str]) -> dict[str, Any]:
    """Values that the user's own configuration has of options that are not typed."""
    if {"--help", "-h"}.intersection(args) or not may_be_configured():
        return {}
    from memplan.sources.cards.organisation import DEFAULTS, defaults, folders

    takes_one = any(each.name in DEFAULTS for each in command.params)
    if not takes_one or not folders():
        return {}
    typed = {word.partition("=")[0] for word in args}
    names = {each.name: each for each in command.params if not typed.intersection(each.opts)}
    found = {name: value for name, value in defaults().items() if name in names}
    if typed & {"--gpu", "--gpu-memory", "--pools"}:
        found = {name: value for name, value in found.items() if name not in ("gpu", "gpu_memory")}
    if "--dask" in typed:
        found.pop("jobs", None)
    if "price" in names and typed & {"--tokens", "--examples"}:
        from memplan.sources.cards.organisation import find

        prices = find("prices.yaml")
        found |= {} if prices is None else {"price": str(prices)}
    return {name: [value] if names[name].multiple else value for name, value in found.items()}


def may_be_configured() -> bool:
    """Whether there may be a folder of ``memplan.sources.cards.organisation``, whose import most commands do without."""
    named = os.environ.get("MEMPLAN_CONFIG")
    if named is not None:
        return bool(named)
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return os.path.isdir(os.path.join(home, "memplan"))  # noqa: PTH112, PTH118
