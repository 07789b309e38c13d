"""What a verl job has beside the actor: the frozen reference, a critic, a reward model, and who generates.

Source: verl 0.9.1, ``workers/engine_workers.py``, ``trainer/ppo/utils.py``.
"""

from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.of_verl.places import (
    ACTOR,
    FSDP,
    MODEL,
    REFERENCE,
    REWARD,
    ROLLOUT,
    generated,
    micro_batch,
    mini_batch,
    number,
)

_JOBS = {"gae": "ppo"}
"""Estimators of the advantage that have a critic; the others compare the answers of a group."""
_CRITIC_OFFLOADS = (
    ("param_offload", "critic.fsdp.param_offload", "critic.model.fsdp_config.param_offload"),
    (
        "optimizer_offload", "critic.fsdp.optimizer_offload",
        "critic.model.fsdp_config.optimizer_offload",
    ),
)  # fmt: skip
_OF_ENGINE = (
    "model_dtype", "dtype", "fsdp_size", "reshard_after_forward", "forward_prefetch", "use_orig_params",
    "offload_policy",
)  # fmt: skip
_LIKE_REFERENCE = {
    f"{REFERENCE}.strategy": f"{ACTOR}.strategy",
    f"{REFERENCE}.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    **{f"{REFERENCE}.fsdp_config.{name}": f"{FSDP}.{name}" for name in _OF_ENGINE},
}
_LIKE_CRITIC = {
    "critic.strategy": f"{ACTOR}.strategy",
    "critic.optim.optimizer": f"{ACTOR}.optim.optimizer",
    **{
        f"critic.model.{name}": f"{MODEL}.{name}"
        for name in (
            "enable_activation_offload", "lora_rank", "use_remove_padding", "use_liger",
        )
    },
    **{
        f"critic.{place}.{name}": f"{FSDP}.{name}"
        for place in ("fsdp", "model.fsdp_config")
        for name in _OF_ENGINE
    },
}  # fmt: skip
"""Keys of what is counted as the actor is, and the actor's own."""
_COLOCATED = ("vllm", "sglang")


def read_job(keys: Keys, found: Found) -> None:
    """Who trains beside the actor, who scores and who generates."""
    kind = _JOBS.get(keys.text("algorithm.adv_estimator") or "gae", "grpo")
    critic = keys.take("critic.enable")
    if kind == "ppo" and critic is False:
        kind = "grpo"
    job: dict[str, object] = {
        "kind": kind,
        "frozen_units": "layers",
        "log_probabilities": "in-place",
    }
    job |= _reference(keys, found, kind)
    if kind == "ppo":
        job |= _critic(keys, found)
    job |= _reward_worker(keys, found)
    job |= _rollout(keys, found)
    # Logits are those of all tokens, prompts' too: answers are cut out of what comes of them.
    job["scored_length"] = length = number(found, "seq_len")
    job["completion_length"] = min(keys.count("data.max_response_length") or length, length)
    scored = _scored_at_once(keys, found)
    if scored != found.fields["micro_batch_size"]:
        job["scoring_batch_size"] = scored
    found.fields["job"] = job


def _reference(keys: Keys, found: Found, kind: str) -> dict[str, object]:
    """None; the actor without its adapter; or a copy whose weights stay in CPU RAM."""
    asked = keys.flag(f"{ACTOR}.use_kl_loss"), keys.flag("algorithm.use_kl_in_reward")
    keys.flag(f"{REFERENCE}.fsdp_config.param_offload")
    if not any(asked):
        return {"reference": "none"} if kind == "ppo" else {}
    _note_unlike(keys, found, _LIKE_REFERENCE, "reference")
    if "adapter" in found.fields:
        return {"reference": "adapter-off"}
    if number(found, "num_gpus") == 1:
        found.notes.append(
            "the reference's weights lie in CPU RAM, which is not modelled on one GPU: the figures are upper "
            "bounds"
        )
        return {"reference": "same"}
    return {"reference": "same", "frozen_offload": True}


def _critic(keys: Keys, found: Found) -> dict[str, object]:
    """A model of its own under an engine of its own, over the same sequences."""
    job: dict[str, object] = {"reward": "none"}
    named = keys.text("critic.model.path")
    if named is not None and named != found.model:
        job["critic"] = _known(named, "critic.model.path", found)
    micro = micro_batch(
        keys, found, "critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size"
    )
    most = keys.count("critic.ppo_max_token_len_per_gpu")
    dynamic = keys.take("critic.use_dynamic_bsz")
    ranks = keys.count("critic.ulysses_sequence_parallel_size") or 1
    if ranks != number(found, "context_parallel"):
        found.notes.append(
            f"critic.ulysses_sequence_parallel_size {ranks}: its sequences are counted as shared by the "
            "actor's number of ranks"
        )
    if dynamic is None:
        dynamic = keys.flag(f"{ACTOR}.use_dynamic_bsz")
    if dynamic and most is not None:
        micro = min(most * ranks // number(found, "seq_len"), mini_batch(keys, found, ranks)) or 1
    if micro is not None and micro != found.fields["micro_batch_size"]:
        job["critic_batch_size"] = micro
    checkpointed = "full" if keys.flag("critic.model.enable_gradient_checkpointing") else "none"
    if checkpointed != found.fields["checkpointing"]:
        job["critic_checkpointing"] = checkpointed
    _note_unlike(keys, found, _LIKE_CRITIC, "critic")
    for name, key, older in _CRITIC_OFFLOADS:
        if keys.flag(key) or keys.flag(older):
            found.notes.append(
                f"critic: {name} takes it off the GPU while others run, which is not modelled: the figures "
                "are upper bounds"
            )
    return job


def _note_unlike(keys: Keys, found: Found, alike: Mapping[str, str], role: str) -> None:
    """Name what the critic or the reference does otherwise than the actor, as which it is counted."""
    for key, of_actor in alike.items():
        if key not in keys.values:
            continue
        own, actors = keys.take(key), keys.values.get(of_actor, keys.preset.value(of_actor))
        same = (own in OFF and actors in OFF) or str(own).lower() == str(actors).lower()
        if not same and not (own is None or str(own).startswith("${")):
            found.notes.append(
                f"{key} {own}: the {role} is counted as the actor, whose is {actors}"
            )


def _known(name: str, key: str, found: Found) -> str:
    """A model's name where it is a built-in's, else a copy of the trained one, said so."""
    from memplan.sources.about_models.registry import find_builtin

    if find_builtin(name) is not None:
        return name
    found.notes.append(f"{key} {name} is not known here: counted as the actor's model")
    return "same"


def _rollout(keys: Keys, found: Found) -> dict[str, object]:
    """Who generates, with which share of the card, and what makes room for it."""
    engine = keys.text(f"{ROLLOUT}.name")
    share = keys.number(f"{ROLLOUT}.gpu_memory_utilization") or 0.5
    may_sleep = keys.take(f"{ROLLOUT}.enable_sleep_mode") is not False
    sleeps = keys.flag(f"{ROLLOUT}.free_cache_engine") and may_sleep
    params, states = keys.flag(f"{FSDP}.param_offload"), keys.flag(f"{FSDP}.optimizer_offload")
    share = max(share, reward_share(keys, found, sleeps=sleeps))
    if generates_apart(keys):
        found.notes.append(
            f"{ROLLOUT}.name {engine} generates on GPUs of its own, which are not counted"
        )
        return {"rollout": "server"}
    if engine == "hf":
        return {"rollout": "hf"}
    if engine is None:
        found.notes.append(f"{ROLLOUT}.name is not set: counted as hf, transformers' generate")
        return {"rollout": "hf"}
    if engine not in _COLOCATED:
        found.left_out.append(f"{ROLLOUT}.name {engine} (its share of the GPUs)")
        return {"rollout": "server"}
    leaves = {(True, True): "all", (True, False): "parameters", (False, True): "optimizer-states"}
    job: dict[str, object] = {
        "rollout": engine, "gpu_memory_utilization": share, "sleep": 2 if sleeps else 0,
    }  # fmt: skip
    if (params, states) in leaves and sleeps:
        job["leaves"] = leaves[(params, states)]
    return job


def _scores_as_worker(keys: Keys) -> bool:
    """Whether a reward model is a worker under FSDP (``workers/fsdp_workers.py`` up to verl 0.8), not an engine."""
    return keys.take("reward_model.use_reward_loop") is False


def _reward_worker(keys: Keys, found: Found) -> dict[str, object]:
    """A frozen model that is sharded as the reference is."""
    keys.take("reward_model.micro_batch_size_per_gpu")
    if not (keys.flag(f"{REWARD}.enable") and _scores_as_worker(keys)):
        return {}
    named = keys.text(f"{REWARD}.model_path")
    return {"reward": "same" if named is None else _known(named, f"{REWARD}.model_path", found)}


def generates_apart(keys: Keys) -> bool:
    """Whether the engine has GPUs of its own (``one_step_off_policy``, ``fully_async_policy``)."""
    apart = keys.take("rollout.n_gpus_per_node"), keys.take("actor_rollout_ref.hybrid_engine")
    return keys.has("async_training") or apart[0] is not None or apart[1] is False


def reward_share(keys: Keys, found: Found, *, sleeps: bool) -> float:
    """A reward model has an engine of its own, which is awake when the other sleeps."""
    asked = keys.flag(f"{REWARD}.enable") and not _scores_as_worker(keys)
    share = keys.number(f"{REWARD}.rollout.gpu_memory_utilization") or 0.5
    apart = keys.flag(f"{REWARD}.enable_resource_pool")
    keys.text(f"{REWARD}.model_path")
    if not asked or apart:
        return 0.0
    if not sleeps:
        found.left_out.append(f"{REWARD}.enable (an engine beside the one that generates)")
        return 0.0
    found.notes.append(f"the reward model's engine takes {share:g} of the card while it scores")
    return share


def _tokens_at_once(keys: Keys, place: str) -> int | None:
    """Tokens of such a pass: the actor's micro-batch's where nothing else is said (``rollout.yaml``, ``ref.yaml``)."""
    key = f"{place}.log_prob_max_token_len_per_gpu"
    own, actors = keys.count(key), keys.count(f"{ACTOR}.ppo_max_token_len_per_gpu")
    return own if key in keys.values else actors


def _scored_at_once(keys: Keys, found: Found) -> int:
    """Sequences of a pass that computes log-probabilities, the actor's or the reference's."""
    micro, length = number(found, "micro_batch_size"), number(found, "seq_len")
    sizes = []
    for place in (ROLLOUT, REFERENCE):
        own = micro_batch(
            keys, found, f"{place}.log_prob_micro_batch_size_per_gpu",
            f"{place}.log_prob_micro_batch_size",
        )  # fmt: skip
        most = _tokens_at_once(keys, place)
        dynamic = keys.take(f"{place}.log_prob_use_dynamic_bsz")
        if dynamic is None:
            dynamic = keys.flag(f"{ACTOR}.use_dynamic_bsz")
        if dynamic:
            tokens = (most or 0) * number(found, "context_parallel")
            # What the actor's lengths were rounded by makes no sequence of its own.
            own = max(1, -(-(tokens - micro + 1) // length)) if most is not None else micro
        sizes.append(own)
    given = [size for size in sizes if size is not None]
    all_of_them = generated(keys, found, number(found, "context_parallel"))
    return max(1, min(max(given), all_of_them or max(given))) if given else micro
