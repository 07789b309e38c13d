"""verl's trainers for SFT: their keys under the names that PPO's file has for the same (verl 0.9.1, ``trainer/config``)."""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.of_verl.places import ACTOR, FSDP, MODEL


def rename_sft(keys: Keys) -> None:
    """Put the keys of the SFT trainer under the names that PPO's has for the same."""
    for key in list(keys.values):
        renamed = _SFT.get(key)
        if renamed is not None:
            keys.values[renamed] = keys.values.pop(key)
    _fill_in(keys, _SFT_DEFAULTS)


def _fill_in(keys: Keys, defaults: Mapping[str, object]) -> None:
    for key, value in defaults.items():
        keys.values.setdefault(key, value)
    keys.values["sft"] = True
    keys.used.add("sft")


def names_engine(keys: Keys) -> bool:
    """Whether the defaults that the file is laid over name an engine: those of SFT over engines do."""
    defaults = keys.values.get("defaults")
    return isinstance(defaults, list) and any(
        isinstance(each, Mapping) and "engine@engine" in each for each in defaults
    )


def rename_engine_sft(keys: Keys, found: Found) -> None:
    """The same of the SFT trainer over engines, whose sections are the actor's own."""
    for name in ("engine", "optim"):
        engine = keys.values.pop(name, "fsdp")
        if engine != "fsdp":
            keys.refuse(name, f"{engine!r:.30} is not modelled; fsdp is")
    for key in list(keys.values):
        renamed = _ENGINE_SFT.get(key)
        section = next((each for each in _ENGINE_SECTIONS if key.startswith(each)), None)
        if renamed is None and section is not None:
            renamed = _ENGINE_SECTIONS[section] + key.removeprefix(section)
        if renamed is not None:
            keys.values[renamed] = keys.values.pop(key)
    if not keys.has("trainer.n_gpus_per_node"):
        found.notes.append("8 GPUs, unless you say others: torchrun has their number")
    _fill_in(keys, _ENGINE_SFT_DEFAULTS)


_ENGINE_SECTIONS = {
    "model.": f"{MODEL}.", "engine.": f"{FSDP}.", "optim.": f"{ACTOR}.optim.",
}  # fmt: skip
"""Sections of the SFT trainer over engines, and where PPO's file has the same."""
_ENGINE_SFT = {
    "engine.strategy": f"{ACTOR}.strategy",
    "engine.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "data.micro_batch_size_per_gpu": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "data.train_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "data.max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
}  # fmt: skip
_ENGINE_SFT_DEFAULTS: dict[str, object] = {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 8192, f"{ACTOR}.ppo_mini_batch_size": 256,
    "data.max_length": 1024,
}  # fmt: skip
"""What ``trainer/config/sft_trainer_engine.yaml`` says."""
_SFT = {
    "model.partial_pretrain": f"{MODEL}.path",
    "model.fsdp_config.model_dtype": f"{FSDP}.model_dtype",
    "model.fsdp_config.cpu_offload": f"{FSDP}.offload_policy",
    "model.fsdp_config.offload_params": f"{FSDP}.param_offload",
    "model.enable_gradient_checkpointing": f"{MODEL}.enable_gradient_checkpointing",
    "model.lora_rank": f"{MODEL}.lora_rank",
    "model.lora_alpha": f"{MODEL}.lora_alpha",
    "model.target_modules": f"{MODEL}.target_modules",
    "model.use_liger": f"{MODEL}.use_liger",
    "model.strategy": f"{ACTOR}.strategy",
    "data.micro_batch_size_per_gpu": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "data.train_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "use_remove_padding": f"{MODEL}.use_remove_padding",
    "ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
}  # fmt: skip
"""Keys of the SFT trainer's file, and of PPO's."""
_SFT_DEFAULTS: dict[str, object] = {
    f"{MODEL}.use_remove_padding": False, f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
}  # fmt: skip
"""What it does otherwise where nothing is said (``trainer/config/sft_trainer.yaml``)."""
