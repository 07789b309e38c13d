"""Files given as a model that are none: what they are, and the option that takes them."""

from collections.abc import Mapping
from pathlib import Path


def named_file(model: object) -> str | None:
    """What to say of a path that names no model's config; None where it may."""
    if not isinstance(model, str) or not Path(model).is_file():
        return None
    from memplan.sources.files import read_mapping

    return other_file(read_mapping(model), model)


def other_file(values: Mapping[str, object], source: str) -> str | None:
    """What to say of a file that is no model's config; None where it may be one.

    >>> other_file({"zero_optimization": {"stage": 3}}, "ds.json")
    "ds.json: is DeepSpeed's file, not a model's: name a MODEL, and give it as --deepspeed-config ds.json"
    >>> other_file({"hidden_size": 4096}, "config.json") is None
    True
    """
    kind, option = _kind(values)
    if not kind or "model_type" in values:
        return None
    named = "" if option == "setup" else "name a MODEL, and "
    return f"{source}: is {kind}, not a model's: {named}give it as --{option.replace('_', '-')} {source}"


def _kind(values: Mapping[str, object]) -> tuple[str, str]:
    """What a file is called, and its option; nothing where its keys are nobody's."""
    from dataclasses import fields

    from memplan.sources.stacks import stack_of
    from memplan.training.setup import TrainingSetup

    if values.keys() & DEEPSPEED_KEYS:
        return "DeepSpeed's file", "deepspeed_config"
    if values.keys() & ACCELERATE_KEYS:
        return "accelerate's file", "accelerate_config"
    stack = stack_of(values)
    if stack is not None:
        return f"a file of {stack}", "setup"
    if values and values.keys() <= {each.name for each in fields(TrainingSetup)} | {"model"}:
        return "a training setup", "setup"
    return "", ""


DEEPSPEED_KEYS = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
"""Of ``ds_config.json`` alone (deepspeed/runtime/constants.py)."""
ACCELERATE_KEYS = frozenset({"compute_environment", "distributed_type"})
"""Of what ``accelerate config`` writes (accelerate/commands/config/config_args.py)."""
