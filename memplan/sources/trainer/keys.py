"""The names that training arguments may have: transformers' ``TrainingArguments`` and TRL's configs.

What each is, is data (``memplan/data/stacks/training_arguments.yaml``), and so is which class has it
(``memplan/data/training_arguments.json``); both are read only when a file of arguments is.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memplan.errors import ConfigError
from memplan.sources.key_tables import Fate, KeyTable, key_table

_FILE = Path(__file__).parents[2] / "data" / "training_arguments.json"

TRL_LENGTH = 1024
"""``max_length`` of TRL's configs that have it."""
TRL_PROMPT_LENGTH = 512
"""``max_prompt_length``, with which TRL up to 0.26 cut prompts; later ones cut none."""
TRL_COMPLETION_LENGTH = 512
"""``max_completion_length`` of trainers that generate (trl 1.16, ``grpo_config.py``)."""
RLOO_BETA = 0.05
"""``beta`` of ``RLOOConfig``."""
GENERATING = ("GRPOConfig", "RLOOConfig", "DistillationConfig")
"""Configs whose sequences are a prompt and what the model generates."""
PAIRED = ("DPOConfig", "RewardConfig", "ORPOConfig", "CPOConfig")
"""Configs whose examples are a chosen and a rejected sequence, passed through the model together."""


@cache
def trainer_names() -> dict[str, Any]:
    """The file of names.

    >>> "gradient_checkpointing" in trainer_names()["training_arguments"]
    True
    """
    names: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return names


def arguments_table() -> KeyTable:
    """What each training argument is."""
    return key_table("training_arguments")


def known_arguments() -> list[str]:
    """Every name that a file of arguments may hold, older spellings left out."""
    table = arguments_table()
    return sorted({*table.fates} - {*table.renamed})


def check_names(values: Mapping[str, object], *, source: str) -> None:
    """Refuse a key that no class of arguments has, with the nearest one."""
    known = known_arguments()
    for key in values:
        if arguments_table().fate(key)[1] is None:
            msg = (
                f"{source}: {key}: no training argument of transformers or TRL.{_guess(key, known)}"
            )
            raise ConfigError(msg)


def _guess(key: str, known: list[str]) -> str:
    """The nearest name; of the two nearest, the one that the table has first: those that are read."""
    close = difflib.get_close_matches(str(key).lower(), known, n=2, cutoff=0.6)
    order = list(arguments_table().fates)
    return f" Did you mean {min(close, key=order.index)!r}?" if close else ""


def trl_config(values: Mapping[str, object], *, source: str) -> str | None:
    """The TRL class that the keys belong to, the first where several have them all; None without one.

    Raises ``ConfigError`` where no one class has them all.

    >>> trl_config({"max_length": 512, "packing": True}, source="example")
    'SFTConfig'
    """
    configs = trainer_names()["configs"]
    spelled = {"max_seq_length": "max_length"}
    own = {spelled.get(key, key): key for key in values}
    theirs = [name for name in own if any(name in config for config in configs.values())]
    if not theirs:
        return None
    for config, names in configs.items():
        if all(name in names for name in theirs):
            return str(config)
    first = next(config for config, names in configs.items() if theirs[0] in names)
    other = next(name for name in theirs if name not in configs[first])
    owner = next(config for config, names in configs.items() if other in names)
    msg = (
        f"{source}: {own[other]}: belongs to TRL's {owner}, and {own[theirs[0]]} to its {first}: "
        "no one trainer takes both"
    )
    raise ConfigError(msg)


def moves_memory(name: str) -> bool:
    """Whether an argument is read, said or refused for what it does to memory.

    >>> moves_memory("bf16"), moves_memory("learning_rate")
    (True, False)
    """
    return arguments_table().fate(name)[1] not in (Fate.QUIET, None)


def remarks(values: Mapping[str, object]) -> Iterator[str]:
    """What the answer should say of arguments that take away what is counted all the same."""
    for name, text in _acting(values, Fate.UPPER):
        yield f"{name} {text}, which is not modelled: the figures are upper bounds"


def left_out(values: Mapping[str, object]) -> Iterator[str]:
    """What the job holds beside what is counted."""
    for name, text in _acting(values, Fate.LEFT_OUT):
        yield f"{name} ({text})"


def stop_at(values: Mapping[str, object], *, source: str) -> None:
    """Refuse arguments that change memory in a way that is not modelled."""
    for name, text in _acting(values, Fate.REFUSED):
        msg = f"{source}: {name}: {text}"
        raise ConfigError(msg)


def _acting(values: Mapping[str, object], fate: Fate) -> Iterator[tuple[str, str]]:
    """Arguments of one fate that are given and do something, each with what the table says of it."""
    table = arguments_table()
    for name, value in values.items():
        found, its = table.fate(name)
        if its is fate and not table.is_off(found, value):
            yield name, table.text(found, fate)


def _shares_gpus(values: Mapping[str, object]) -> bool:
    """Whether vLLM runs on the GPUs that train; TRL up to 0.15 gave it one of its own (``vllm_device``)."""
    elsewhere = values.get("vllm_device") is not None
    mode = values.get("vllm_mode", "server" if elsewhere else "colocate")
    return bool(values.get("use_vllm")) and mode == "colocate"


WITHOUT_DROPOUT = (*PAIRED, "KTOConfig")
"""Configs whose ``disable_dropout`` is true by default."""


def trl_job(
    config: str, values: Mapping[str, object], *, has_adapter: bool
) -> dict[str, object] | None:
    """A trainer of TRL's as a ``job``; None: the model's own task."""
    if config in ("DPOConfig", "KTOConfig"):
        precomputed = values.get("precompute_ref_log_probs")
        kind = "dpo" if config == "DPOConfig" else "kto"
        return {"kind": kind, "reference": "precomputed" if precomputed else None}
    if config in ("RewardConfig", "ORPOConfig"):
        return {"kind": config.removesuffix("Config").lower()}
    if config == "CPOConfig":
        return {"kind": "simpo" if values.get("loss_type") == "simpo" else "cpo"}
    if config not in GENERATING:
        return None
    return _generating_job(config, values, has_adapter=has_adapter)


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _generating_job(
    config: str, values: Mapping[str, object], *, has_adapter: bool
) -> dict[str, object]:
    """GRPO, RLOO, which differs in how advantages are made alone, and distillation on the student's own answers."""
    if config == "DistillationConfig":
        return _distillation(values)
    job: dict[str, object] = {"kind": "grpo"}
    if values.get("beta", RLOO_BETA if config == "RLOOConfig" else 0.0):
        job["reference"] = "adapter-off" if has_adapter else "same"
    if values.get("max_completion_length") is not None:
        job["completion_length"] = values["max_completion_length"]
    if _shares_gpus(values):
        job["rollout"] = "vllm"
        job["gpu_memory_utilization"] = values.get("vllm_gpu_memory_utilization")
        job["sleep"] = 2 if values.get("vllm_enable_sleep_mode") else None
    elif values.get("use_vllm"):
        job["rollout"] = "server"
    return job


def _distillation(values: Mapping[str, object]) -> dict[str, object]:
    """The teacher, and what it is loaded in; generation is not modelled beside it."""
    job: dict[str, object] = {"kind": "distillation"}
    if values.get("teacher_model_name_or_path") is not None:
        job["teacher"] = values["teacher_model_name_or_path"]
    loading = values.get("teacher_model_init_kwargs")
    if isinstance(loading, Mapping) and loading.get("dtype") is not None:
        job["frozen_dtype"] = _DTYPES.get(str(loading["dtype"]).rpartition(".")[2])
    return job


def trl_remarks(config: str, values: Mapping[str, object]) -> Iterator[str]:
    """What the answer should say of a TRL trainer."""
    if config in PAIRED:
        yield f"{config}: each example is two sequences, chosen and rejected"
    if config == "SFTConfig" and values.get("loss_type", "nll") != "nll":
        yield f"loss_type {values['loss_type']} is counted as nll"
    if config == "DistillationConfig":
        yield "DistillationConfig: completions that the student generates are counted as read, not as generated"
    if config == "RLOOConfig":
        yield "RLOOConfig is counted as GRPO, which differs in how advantages are made alone"
    if config in GENERATING and values.get("use_vllm") and not _shares_gpus(values):
        yield "use_vllm: the server's GPUs are not counted"


def older_names(values: Mapping[str, object]) -> Iterator[str]:
    """What the answer should say of spellings that today's versions do not know."""
    for key in values:
        if key in arguments_table().renamed:
            today = arguments_table().renamed[key]
            said = f"is {today} today" if today else "is no argument today"
            yield f"{key} {said}; today's transformers and TRL refuse it"
