"""The names that training arguments may have: transformers' ``TrainingArguments`` and TRL's configs.

The names are data (``memplan/data/training_arguments.json``, which says of which versions), read only
when a file of arguments is.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memplan.errors import ConfigError
from memplan.fast_dataclass import dataclass

_FILE = Path(__file__).parent.parent / "data" / "training_arguments.json"

TRL_LENGTH = 1024
"""``max_length`` of TRL's configs that have it."""
PAIRED = ("DPOConfig", "RewardConfig")
"""Configs whose examples are a chosen and a rejected sequence, passed through the model together."""


@cache
def trainer_names() -> dict[str, Any]:
    """The file of names.

    >>> "gradient_checkpointing" in trainer_names()["training_arguments"]
    True
    """
    names: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return names


def known_arguments() -> list[str]:
    """Every name that a file of arguments may hold, older spellings left out."""
    names = trainer_names()
    own = {name for config in names["configs"].values() for name in config}
    return sorted({*names["training_arguments"], *own})


def check_names(values: Mapping[str, object], *, source: str) -> None:
    """Refuse a key that no class of arguments has, with the nearest one."""
    known = known_arguments()
    for key in values:
        if key not in known and key not in trainer_names()["renamed"]:
            msg = (
                f"{source}: {key}: no training argument of transformers or TRL.{_guess(key, known)}"
            )
            raise ConfigError(msg)


def _guess(key: str, known: list[str]) -> str:
    """The nearest name; of the two nearest, the one that moves memory."""
    close = difflib.get_close_matches(str(key).lower(), known, n=2, cutoff=0.6)
    acting = [name for name in close if name in _ACTING]
    return f" Did you mean {(acting or close)[0]!r}?" if close else ""


_ACTING = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing",
    "activation_checkpointing_kwargs", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "optim", "bf16", "fp16", "use_liger_kernel", "liger_kernel_config", "torch_compile", "fsdp", "fsdp_config",
    "deepspeed", "max_length", "packing", "padding_free", "packing_strategy", "accelerator_config", "ddp_bucket_cap_mb",
})  # fmt: skip
"""Names whose values are read."""


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


_READ = frozenset({
    "activation_offloading", "auto_find_batch_size", "beta", "ddp_broadcast_buffers",
    "batch_eval_metrics", "ddp_find_unused_parameters", "ddp_static_graph", "disable_dropout",
    "eval_accumulation_steps", "eval_on_start", "eval_strategy", "evaluate_during_training",
    "evaluation_strategy", "loss_type", "per_device_eval_batch_size", "per_gpu_eval_batch_size",
    "prediction_loss_only",
    "liger_kernel_config", "max_completion_length", "model_init_kwargs", "num_generations",
    "packing_strategy", "padding_free", "optim_args", "optim_target_modules",
    "parallelism_config", "precompute_ref_log_probs", "torch_compile_backend",
    "torch_compile_mode", "use_cpu", "use_vllm", "vllm_gpu_memory_utilization", "vllm_mode",
})  # fmt: skip
"""Names whose values are looked at besides, or refused."""


def moves_memory(name: str) -> bool:
    """Whether an argument is read, said or refused for what it does to memory.

    >>> moves_memory("bf16"), moves_memory("learning_rate")
    (True, False)
    """
    return name in _ACTING | _READ or name in (*REMARKS, *ADDED, *STOPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """What to say of an argument that moves memory and is not modelled."""

    text: str
    off: tuple[object, ...] = (None, False)
    """Values with which it does nothing."""

    def applies(self, values: Mapping[str, object], name: str) -> bool:
        """Whether the argument is given, and does something."""
        return name in values and values[name] not in self.off


_UPPER = "which is not modelled: the figures are upper bounds"

REMARKS: Mapping[str, Remark] = {
    "full_determinism": Remark(text=f"makes cuBLAS workspaces smaller, {_UPPER}"),
    "pad_to_multiple_of": Remark(
        text="may make sequences a little longer", off=(None, "auto", 0, 1)
    ),
}
"""By name."""

ADDED: Mapping[str, Remark] = {
    "neftune_noise_alpha": Remark(text="noise on the embeddings", off=(None, 0)),
    "label_smoothing_factor": Remark(text="another copy of the logits", off=(None, 0)),
    "use_cache": Remark(text="keys and values that the forward pass keeps"),
    "cast_lm_head_to_fp32": Remark(text="the output matrix in fp32"),
    "router_aux_loss_coef": Remark(text="a loss over the router's logits"),
    "torch_compile_mode": Remark(
        text="CUDA graphs' own pool", off=(None, "default", "max-autotune-no-cudagraphs")
    ),
    "sync_ref_model": Remark(text="a reference model that follows"),
}
"""What an argument adds to a job and no figure holds, by its name."""


def remarks(values: Mapping[str, object]) -> Iterator[str]:
    """What the answer should say of the arguments that it does not hold."""
    for name, remark in REMARKS.items():
        if remark.applies(values, name):
            yield f"{name} {remark.text}"


def left_out(values: Mapping[str, object]) -> Iterator[str]:
    """What the job holds beside what is counted."""
    for name, remark in ADDED.items():
        if remark.applies(values, name):
            yield f"{name} ({remark.text})"


def _shares_gpus(values: Mapping[str, object]) -> bool:
    """Whether vLLM runs on the GPUs that train."""
    return bool(values.get("use_vllm")) and values.get("vllm_mode", "colocate") == "colocate"


def trl_job(
    config: str, values: Mapping[str, object], *, has_adapter: bool
) -> dict[str, object] | None:
    """A trainer of TRL's as a ``job``; None: the model's own task."""
    if config == "DPOConfig":
        precomputed = values.get("precompute_ref_log_probs")
        return {"kind": "dpo", "reference": "precomputed" if precomputed else None}
    if config == "RewardConfig":
        return {"kind": "reward"}
    if config != "GRPOConfig":
        return None
    job: dict[str, object] = {"kind": "grpo"}
    if values.get("beta"):
        job["reference"] = "adapter-off" if has_adapter else "same"
    if "max_completion_length" in values:
        job["completion_length"] = values["max_completion_length"]
    if _shares_gpus(values):
        job["rollout"] = "vllm"
        job["gpu_memory_utilization"] = values.get("vllm_gpu_memory_utilization")
        job["sleep"] = 2 if values.get("vllm_enable_sleep_mode") else None
    elif values.get("use_vllm"):
        job["rollout"] = "server"
    return job


def trl_remarks(config: str, values: Mapping[str, object]) -> Iterator[str]:
    """What the answer should say of a TRL trainer."""
    if config in PAIRED:
        yield f"{config}: each example is two sequences, chosen and rejected"
    if config == "SFTConfig" and values.get("loss_type", "nll") != "nll":
        yield f"loss_type {values['loss_type']} is counted as nll"
    if config == "GRPOConfig":
        yield from _grpo_remarks(values)


def _grpo_remarks(values: Mapping[str, object]) -> Iterator[str]:
    length, group = values.get("max_completion_length", 256), values.get("num_generations", 8)
    yield (
        f"GRPOConfig: num_generations {group} sequences of a prompt and up to max_completion_length "
        f"{length} tokens: give seq_len"
    )
    if values.get("use_vllm") and not _shares_gpus(values):
        yield "use_vllm: the server's GPUs are not counted"


STOPPED: Mapping[str, str] = {
    "per_gpu_train_batch_size": "write per_device_train_batch_size",
    "adafactor": "write optim",
    "no_cuda": "there is no GPU memory to plan on a CPU",
    "use_mps_device": "there is no GPU memory to plan on that device",
    "use_cpu": "there is no GPU memory to plan on a CPU",
    "tp_size": "older versions had it; write tensor_parallel in the setup",
    "mp_parameters": "model parallelism of SageMaker is not modelled; leave it out",
    "sharded_ddp": "write fsdp",
    "torchdynamo": "write torch_compile_backend",
    "split_batches": "is not modelled; write the batch of one GPU and leave it out",
    "fsdp_min_num_params": "units by size are not modelled; leave it out",
    "auto_find_batch_size": "changes memory and is not modelled; leave it out",
    "parallelism_config": "changes memory and is not modelled; leave it out",
}
"""Arguments, of today and of older versions, that cannot be passed over unless they are off."""


def stop_at(values: Mapping[str, object], *, source: str) -> None:
    """Refuse arguments that change memory in a way that is not modelled."""
    for key, advice in STOPPED.items():
        value = values.get(key)
        off = value is not True and value in (None, False, 0, 1, "", [], {})
        if key in values and (not off or (key == "per_gpu_train_batch_size" and value is not None)):
            msg = f"{source}: {key}: {advice}"
            raise ConfigError(msg)


def older_names(values: Mapping[str, object]) -> Iterator[str]:
    """What the answer should say of spellings that today's versions do not know."""
    for key in values:
        if key in trainer_names()["renamed"]:
            today = trainer_names()["renamed"][key]
            said = f"is {today} today" if today else "is no argument today"
            yield f"{key} {said}; today's transformers and TRL refuse it"
