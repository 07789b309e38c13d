"""Stacks that run transformers' Trainer: what of their file is handed on to its arguments."""

from collections.abc import Mapping

from memplan.errors import SetupError
from memplan.sources.key_tables import Fate
from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.trainer.keys import arguments_table, moves_memory
from memplan.sources.trainer.optimizer import OPTIMIZERS
from memplan.training.coercion import coerce_enum
from memplan.training.optimizers import Optimizer


def pass_arguments(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Hand on every key that is a training argument, as it stands.

    Those that move no memory are said to. An optimizer that was named beside the file needs none of
    its own.
    """
    table = arguments_table()
    names: set[str | None] = {*table.fates, *table.renamed}
    given_keys = {key.partition(".")[0] for key in keys.values if key not in keys.used}
    own = {name for name, fate in keys.table.fates.items() if fate is not Fate.READ}
    wanted = (given_keys & names) - own
    for name in sorted(wanted):
        if name in keys.values or keys.has(name):
            value = keys.section(name) or keys.take(name)
            if moves_memory(name):
                found.arguments[name] = value
            else:
                found.quiet.append(name)
    given_today = {*found.arguments, *map(table.renamed.get, found.arguments)}
    for default in keys.preset.defaults:
        key = default.key
        if key is not None and key in names and key not in given_today:
            found.arguments[key] = keys.take(key)
    if found.arguments.get("fp16") and "bf16" not in keys.values:
        found.arguments["bf16"] = False
        keys.taken.discard("bf16")
    optimizer = found.arguments.get("optim")
    if optimizer is not None:
        found.arguments["optim"] = _optimizer(str(optimizer), "optim", found, given)


_SPELLED = {
    "came_pytorch": "came", "ao_adamw_8bit": "torchao-adamw-8bit",
    "ao_adamw_4bit": "torchao-adamw-4bit", "ao_adamw_fp8": "torchao-adamw-fp8",
    "q_galore_adamw8bit": "q-galore-adamw-8bit",
}  # fmt: skip
"""axolotl's own names (``CustomSupportedOptimizers``)."""


def _optimizer(name: str, key: str, found: Found, given: Mapping[str, object]) -> str:
    """An optimizer's name, or that of the nearest that is counted, said so."""
    if name in OPTIMIZERS:
        return name
    try:
        spelled = _SPELLED.get(name, name.replace("_", "-"))
        found.fields["optimizer"] = coerce_enum("optimizer", spelled, Optimizer)
    except SetupError:
        pass
    else:
        return "adamw_torch_fused"
    if "optimizer" not in given:
        found.left_out.append(
            f"{key} {name} (its own states and step; adamw_torch_fused's are counted)"
        )
    return "adamw_torch_fused"


def add_optimizer(keys: Keys, key: str, found: Found, given: Mapping[str, object]) -> None:
    """Hand on an optimizer that the stack has under another key."""
    name = keys.text(key)
    if name is not None:
        found.arguments["optim"] = _optimizer(name, key, found, given)
