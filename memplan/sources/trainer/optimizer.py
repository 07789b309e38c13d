"""The optimizer that training arguments name: ``optim``, ``optim_args``, ``optim_target_modules``."""

from collections.abc import Mapping

from memplan.errors import ConfigError, did_you_mean
from memplan.sources.trainer.values import ArgumentValues
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.spellings import TRANSFORMERS, UNMODELLED

OPTIMIZERS = TRANSFORMERS
"""transformers' names of the optimizers that are modelled."""


def read_optimizer(file: ArgumentValues) -> dict[str, object]:
    """``optim``, ``optim_args`` and ``optim_target_modules``."""
    name = file.values.get("optim", "adamw_torch_fused")
    spelling = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if spelling is None:
        if isinstance(name, str) and name in UNMODELLED:
            file.refuse("optim", f"{name}: {UNMODELLED[name]}")
        known = list(OPTIMIZERS)
        hint = did_you_mean(str(name), known)
        msg = f"{file.source}: optim: {str(name)[:60]!r} is not modelled.{hint}"
        raise ConfigError(msg)
    found: dict[str, object] = {"optimizer": spelling.optimizer}
    options = {**dict(spelling.options), **_options(file, spelling.optimizer)}
    if options:
        found["optimizer_options"] = options
    if spelling.in_backward:
        found["optimizer_in_backward"] = True
    return found


def _options(file: ArgumentValues, optimizer: Optimizer) -> dict[str, object]:
    """The settings that move memory; others are passed over, as the Trainer does."""
    from memplan.training.optimizers.table import row_of

    known = row_of(optimizer).options
    given = _arguments(file)
    idle = [key for key in given if key not in known]
    if idle:
        file.notes.append(f"optim_args: {', '.join(idle)} moves no memory of {optimizer.value}")
    found = {key: value for key, value in given.items() if key in known}
    targets = _targets(file)
    if "target_modules" not in known:
        if targets:
            file.notes.append("optim_target_modules does nothing with this optimizer")
    elif targets:
        found["target_modules"] = targets
    else:
        usual = known["target_modules"]
        file.notes.append(f"{optimizer.value} needs optim_target_modules: counted as {usual}")
    return found


def _arguments(file: ArgumentValues) -> dict[str, object]:
    """``optim_args``: text, or a mapping."""
    from memplan.training.optimizers.arguments import parse_arguments

    key = "optim_args"
    given = file.values.get(key)
    if given in (None, "", {}):
        return {}
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    if not isinstance(given, str):
        raise file.wrong(key, "text such as rank=64,update_proj_gap=100")
    try:
        return parse_arguments(given)
    except ValueError as error:
        file.refuse(key, str(error))


def _targets(file: ArgumentValues) -> str:
    """``optim_target_modules``: names, or one pattern."""
    key = "optim_target_modules"
    given = file.values.get(key)
    if given in (None, "", []):
        return ""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise file.wrong(key, "names, a pattern or all-linear")
    return ",".join(names)
