"""verl's YAML: the hydra configuration of its PPO trainer, whole or what is laid over verl's own, and of SFT.

The actor, the frozen reference and the engine that generates share the GPUs. A hydra file's ``defaults`` are verl's
own, which the preset has; what is typed behind the command goes into the file.
"""

from collections.abc import Mapping

from memplan.sources.stacks.found import Found, of_given
from memplan.sources.stacks.keys import Keys
from memplan.sources.stacks.optimizer import add_named_optimizer
from memplan.sources.stacks.wording import lora

NAME = "verl"

ACTOR = "actor_rollout_ref.actor"
FSDP = "actor_rollout_ref.actor.fsdp_config"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
_ENGINES = {"fsdp": "fsdp1", "fsdp2": "fsdp"}
_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_PRECISIONS = {("fp32", "bf16"): "bf16-mixed", ("bf16", "bf16"): "bf16", ("fp32", "fp32"): "fp32"}
_JOBS = {"gae": "ppo"}
"""Estimators of the advantage that have a critic; the others compare the answers of a group."""


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether an actor stands in it, or a model for SFT."""
    model = values.get("model")
    return "actor_rollout_ref" in values or (
        isinstance(model, Mapping) and "partial_pretrain" in model
    )


def preset_for(_values: Mapping[str, object]) -> str:
    """It has one set of defaults."""
    return "verl"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    if keys.has("model.partial_pretrain"):
        _rename_sft(keys)
    found.model = keys.text(f"{MODEL}.path")
    _read_gpus(keys, found)
    _read_sizes(keys, found)
    _read_engine(keys, found, given)
    found.fields["checkpointing"] = (
        "full" if keys.flag(f"{MODEL}.enable_gradient_checkpointing") else "none"
    )
    add_named_optimizer(keys, f"{ACTOR}.optim.optimizer", found, given)
    rank = keys.take(f"{MODEL}.lora_rank")
    alpha, targets = keys.number(f"{MODEL}.lora_alpha"), keys.names(f"{MODEL}.target_modules")
    if isinstance(rank, int) and rank > 0:
        found.fields["adapter"] = lora(
            rank=rank, alpha=alpha, dropout=0.0,
            targets="all-linear" if targets == ("all-linear",) else targets,
        )  # fmt: skip
    if keys.flag(f"{MODEL}.use_liger"):
        found.fields |= {"norm": "liger", "mlp": "fused", "rotary": "liger"}
    if keys.flag(f"{MODEL}.use_remove_padding"):
        found.fields["packing"] = "padding_free"
    if not keys.has("sft"):
        _read_job(keys, found)


def _rename_sft(keys: Keys) -> None:
    """Put the keys of the SFT trainer under the names that PPO's has for the same."""
    for key in list(keys.values):
        renamed = _SFT.get(key)
        if renamed is not None:
            keys.values[renamed] = keys.values.pop(key)
    keys.values["sft"] = True
    keys.used.add("sft")


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


def _read_gpus(keys: Keys, found: Found) -> None:
    nodes = keys.count("trainer.nnodes") or 1
    found.fields["num_gpus"] = nodes * (keys.count("trainer.n_gpus_per_node") or 8)
    found.fields["num_nodes"] = nodes
    parallel = keys.count(f"{ACTOR}.ulysses_sequence_parallel_size")
    if parallel not in (None, 1):
        found.fields |= {"context_parallel": parallel, "context_parallel_kind": "all-to-all"}


def _read_sizes(keys: Keys, found: Found) -> None:
    prompt = keys.count("data.max_prompt_length") or 512
    answer = keys.count("data.max_response_length") or 512
    length = keys.count("data.max_length") if keys.has("sft") else None
    found.fields["seq_len"] = length or prompt + answer
    micro = keys.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    most = keys.count(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if keys.flag(f"{ACTOR}.use_dynamic_bsz") and most is not None:
        micro = max(1, most // (length or prompt + answer))
        found.notes.append(
            f"use_dynamic_bsz: a micro-batch of {most} tokens is counted as {micro} sequences of the "
            "greatest length"
        )
    keys.take(f"{ACTOR}.ppo_micro_batch_size")
    if micro is None:
        found.notes.append(f"{ACTOR}.ppo_micro_batch_size_per_gpu is not set: counted as 1")
    found.fields["micro_batch_size"] = micro or 1
    keys.take(f"{ACTOR}.ppo_mini_batch_size")


def _read_engine(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    strategy = keys.text(f"{ACTOR}.strategy") or "fsdp"
    if strategy not in _ENGINES:
        keys.refuse(f"{ACTOR}.strategy", f"{strategy!r:.30} is not modelled; fsdp and fsdp2 are")
    engine = of_given(given, "engine") or _ENGINES[strategy]
    found.fields["engine"] = engine
    weights = keys.choice(f"{FSDP}.model_dtype", _DTYPES)
    compute = keys.choice(f"{FSDP}.dtype", _DTYPES)
    found.fields["precision"] = _PRECISIONS.get((str(weights), str(compute)), "bf16-mixed")
    if engine == "fsdp" and keys.take(f"{FSDP}.reshard_after_forward") is False:
        found.options["reshard_after_forward"] = False
    if keys.flag(f"{FSDP}.offload_policy"):
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    for key in ("param_offload", "optimizer_offload"):
        if keys.flag(f"{FSDP}.{key}"):
            found.notes.append(
                f"{key} moves to the CPU what generation does not need: training holds it on the GPU"
            )
    group = keys.take(f"{FSDP}.fsdp_size")
    gpus = found.fields["num_gpus"]
    assert isinstance(gpus, int)
    if isinstance(group, int) and 0 < group < gpus and engine == "fsdp":
        found.options["data_parallel_replicate_degree"] = gpus // group


def _read_job(keys: Keys, found: Found) -> None:
    kind = _JOBS.get(keys.text("algorithm.adv_estimator") or "gae", "grpo")
    job: dict[str, object] = {"kind": kind}
    has_reference = keys.flag(f"{ACTOR}.use_kl_loss") or keys.flag("algorithm.use_kl_in_reward")
    if has_reference:
        job["reference"] = "same"
    elif kind == "ppo":
        job["reference"] = "none"
    if kind == "ppo" and not keys.on("reward_model.enable"):
        job["reward"] = "none"
    engine = keys.text(f"{ROLLOUT}.name")
    share = keys.number(f"{ROLLOUT}.gpu_memory_utilization")
    sleeps = keys.flag(f"{ROLLOUT}.free_cache_engine")
    if engine in ("vllm", "sglang"):
        job |= {
            "rollout": engine,
            "gpu_memory_utilization": share or 0.5,
            "sleep": 2 if sleeps else 0,
        }
    job["completion_length"] = keys.count("data.max_response_length")
    found.fields["job"] = job
