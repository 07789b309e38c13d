"""verl's YAML: the hydra configuration of its PPO trainer, whole or what is laid over verl's own, and of SFT.

The actor, the frozen reference and the engine that generates share the GPUs. A hydra file's ``defaults`` are verl's
own, which the preset has; a script's words are read as what they are laid over. Source: verl 0.9.1,
``workers/engine/fsdp/transformer_impl.py``, ``workers/engine_workers.py``, ``trainer/ppo/utils.py``.
"""

from collections.abc import Mapping

from memplan.sources.key_tables import OFF
from memplan.sources.stacks.common.found import Found, of_given
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.wording import lora
from memplan.text import shown

NAME = "verl"

ACTOR = "actor_rollout_ref.actor"
FSDP = "actor_rollout_ref.actor.fsdp_config"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
REWARD = "reward.reward_model"
_ENGINES = {"fsdp": "fsdp1", "fsdp2": "fsdp"}
_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16",
}  # fmt: skip
_PRECISIONS = {
    ("fp32", "bf16"): "bf16-mixed", ("bf16", "bf16"): "bf16", ("fp32", "fp32"): "fp32",
    ("fp32", "fp16"): "fp16-mixed",
}  # fmt: skip
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash3",
}  # fmt: skip
_JOBS = {"gae": "ppo"}
"""Estimators of the advantage that have a critic; the others compare the answers of a group."""
_MARKS = ("ppo_trainer", "ppo_megatron_trainer", "ppo_torchtitan_trainer", "ppo_veomni_trainer")
"""Files of verl's own that a hydra file's ``defaults`` name."""
_WHOLE = ("_trainer", "_trainer_engine", "_trainer_split")
"""How the names of its whole configurations end."""
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
_OTHER_ENGINES = ("megatron", "torchtitan", "veomni")
_COLOCATED = ("vllm", "sglang")


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether an actor stands in it, a model for SFT, or defaults or classes of verl's own."""
    model, defaults = values.get("model"), values.get("defaults")
    named = isinstance(defaults, list) and any(
        each in _MARKS or (isinstance(each, Mapping) and "actor@actor_rollout_ref.actor" in each)
        for each in defaults
    )
    target = values.get("_target_")
    return (
        "actor_rollout_ref" in values
        or (isinstance(model, Mapping) and "partial_pretrain" in model)
        or _is_engine_sft(values)
        or named
        or (isinstance(target, str) and target.startswith("verl."))
    )


def _is_engine_sft(values: Mapping[str, object]) -> bool:
    """Whether it is of the SFT trainer over engines (``trainer/config/sft_trainer_engine.yaml``), or laid over that."""
    model, data, defaults = (values.get(name) for name in ("model", "data", "defaults"))
    named = isinstance(defaults, list) and any(
        isinstance(each, Mapping) and "engine@engine" in each for each in defaults
    )
    has_model = isinstance(model, Mapping) and "path" in model and isinstance(data, Mapping)
    return named or (has_model and "engine" in values and "optim" in values)


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "verl"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    _check_whole(keys)
    program = keys.text("program")
    if program is not None:
        found.notes.append(
            f"{program} is a program of its own: read as verl's trainers, whose defaults and places of "
            "models it need not have"
        )
    if keys.has("model.partial_pretrain"):
        _rename_sft(keys)
    elif not keys.has("actor_rollout_ref") and (keys.has("engine") or _names_engine(keys)):
        _rename_engine_sft(keys, found)
    found.model = keys.model(f"{MODEL}.path")
    _read_gpus(keys, found)
    _read_sizes(keys, found)
    _read_engine(keys, found, given)
    _read_model(keys, found)
    _read_optimizer(keys, found, given)
    _read_adapter(keys, found)
    if not keys.has("sft"):
        _read_job(keys, found)


def _check_whole(keys: Keys) -> None:
    """Refuse a section alone, and what trains under another engine."""
    if keys.has("_target_"):
        keys.refuse("_target_", "this is one section of a verl configuration: give the whole")
    defaults = keys.values.get("defaults")
    for each in defaults if isinstance(defaults, list) else []:
        if (
            isinstance(each, str)
            and "@" not in each
            and each != "_self_"
            and not each.endswith(_WHOLE)
        ):
            keys.refuse("defaults", f"{shown(each)} is not beside the file: put what it says there")
        names = map(str, each.values() if isinstance(each, Mapping) else (each,))
        for name in names:
            engine = next((one for one in _OTHER_ENGINES if one in name), None)
            if engine is not None and name.endswith(("_trainer", "_actor")):
                keys.refuse("defaults", f"{name}: verl's engine {engine} is not modelled; fsdp is")


def _rename_sft(keys: Keys) -> None:
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


def _names_engine(keys: Keys) -> bool:
    defaults = keys.values.get("defaults")
    return isinstance(defaults, list) and any(
        isinstance(each, Mapping) and "engine@engine" in each for each in defaults
    )


def _rename_engine_sft(keys: Keys, found: Found) -> None:
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


# -- sizes -----------------------------------------------------------------------------------------


def _read_gpus(keys: Keys, found: Found) -> None:
    nodes = _nodes(keys, found)
    found.fields["num_gpus"] = nodes * (keys.count("trainer.n_gpus_per_node") or 8)
    found.fields["num_nodes"] = nodes
    parallel = keys.count(f"{ACTOR}.ulysses_sequence_parallel_size")
    if parallel not in (None, 1):
        found.fields |= {"context_parallel": parallel, "context_parallel_kind": "all-to-all"}


def _nodes(keys: Keys, found: Found) -> int:
    """Of a script that asks its scheduler how many there are, one, and said so."""
    key = "trainer.nnodes"
    if str(keys.values.get(key)).startswith("${"):
        keys.used.add(key)
        found.notes.append(
            f"{key}: its scheduler says how many: counted as 1, unless you say others"
        )
        return 1
    return keys.count(key) or 1


def _number(found: Found, field: str) -> int:
    value = found.fields.get(field, 1)
    assert isinstance(value, int)
    return value


def _read_sizes(keys: Keys, found: Found) -> None:
    prompt = keys.count("data.max_prompt_length") or 512
    answer = keys.count("data.max_response_length") or 512
    length = keys.count("data.max_length") if keys.has("sft") else None
    whole = length or prompt + answer
    most = keys.count(f"{ACTOR}.ppo_max_token_len_per_gpu")
    micro = _micro_batch(
        keys, found, f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"
    )
    of_step = _mini_batch(keys, found, _number(found, "context_parallel"))
    dynamic = keys.flag(f"{ACTOR}.use_dynamic_bsz")
    if dynamic and most is not None:
        # A micro-batch is filled up with sequences, and each rank of a group has its share of them.
        tokens = most * _number(found, "context_parallel")
        micro = max(1, -(-tokens // whole))
        what = f"a micro-batch of {tokens} tokens"
        if of_step < micro:
            micro, what = max(1, of_step), f"a GPU's mini-batch, of less than {tokens} tokens,"
        elif tokens > whole:
            whole = max(1, tokens // micro)
        found.notes.append(f"use_dynamic_bsz: {what} is counted as {micro} sequences of {whole}")
    elif micro is None:
        found.notes.append(f"{ACTOR}.ppo_micro_batch_size_per_gpu is not set: counted as 1")
    micro = micro or 1
    whole = _divided(whole, _number(found, "context_parallel"))
    found.fields |= {"seq_len": whole, "micro_batch_size": micro}
    found.fields["gradient_accumulation_steps"] = max(1, of_step // micro)
    if not dynamic and of_step % micro and not keys.has("sft"):
        # ``fsdp_workers.py`` asserts it.
        found.notes.append(
            f"{ACTOR}.ppo_mini_batch_size: the {of_step} sequences of a GPU are no multiple of its micro-batch "
            f"of {micro}: verl stops at it on {_number(found, 'num_gpus')} GPUs"
        )


def _divided(length: int, ranks: int) -> int:
    """A length that the ranks share evenly: verl pads the last of them (``ulysses_pad``)."""
    return -(-length // ranks) * ranks


def _micro_batch(keys: Keys, found: Found, key: str, older: str) -> int | None:
    """Sequences of a micro-batch on one rank; the older key has those of all ranks."""
    own, of_all = keys.count(key), keys.take(older)
    if own is None and isinstance(of_all, int) and of_all > 0:
        ranks = _number(found, "num_gpus") // _number(found, "context_parallel")
        own = max(1, of_all // max(1, ranks))
    return own


def _generated(keys: Keys, found: Found, shared_by: int) -> int:
    """The same of all that one round of generation hands over, which is scored before the first step; 0: not said."""
    return _shared(keys, found, "data.train_batch_size", shared_by)


def _mini_batch(keys: Keys, found: Found, shared_by: int) -> int:
    """Sequences that a group of ranks, which share each of them, has in one mini-batch, which is one step."""
    return _shared(keys, found, f"{ACTOR}.ppo_mini_batch_size", shared_by)


def _shared(keys: Keys, found: Found, key: str, shared_by: int) -> int:
    prompts = keys.take(key)
    answers = 1 if keys.has("sft") else keys.count(f"{ROLLOUT}.n") or 1
    groups = max(1, _number(found, "num_gpus") // shared_by)
    return (prompts if isinstance(prompts, int) else 0) * answers // groups


# -- engine and model ------------------------------------------------------------------------------


def _read_engine(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    strategy = keys.text(f"{ACTOR}.strategy") or "fsdp"
    if strategy not in _ENGINES:
        keys.refuse(f"{ACTOR}.strategy", f"{strategy!r:.30} is not modelled; fsdp and fsdp2 are")
    engine = of_given(given, "engine") or _ENGINES[strategy]
    found.fields["engine"] = engine
    _read_formats(keys, found, engine)
    keeps = keys.take(f"{FSDP}.reshard_after_forward") is False
    if engine == "fsdp" and keeps:
        found.options["reshard_after_forward"] = False
    elif engine == "fsdp1":
        found.fields["fsdp_strategy"] = "shard_grad_op" if keeps else "full_shard"
        found.options["use_orig_params"] = keys.flag(f"{FSDP}.use_orig_params")
        found.options["forward_prefetch"] = keys.flag(f"{FSDP}.forward_prefetch")
    found.options["sync_each_batch"] = not keys.flag(
        f"{FSDP}.use_no_sync_for_gradient_accumulation"
    )
    if keys.flag(f"{FSDP}.offload_policy") and engine == "fsdp":
        found.fields |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    group, gpus = keys.take(f"{FSDP}.fsdp_size"), _number(found, "num_gpus")
    if isinstance(group, int) and 0 < group < gpus:
        found.options["data_parallel_replicate_degree"] = gpus // group
        if engine == "fsdp1":
            found.fields["fsdp_strategy"] = "hybrid"


def _read_formats(keys: Keys, found: Found, engine: str) -> None:
    """Weights, what they are computed in, and autocast over all (``forward_step``)."""
    weights = keys.choice(f"{FSDP}.model_dtype", _DTYPES) or "fp32"
    compute = keys.choice(f"{FSDP}.dtype", _DTYPES)
    compute = keys.choice(f"{FSDP}.mixed_precision.param_dtype", _DTYPES) or compute or "bf16"
    reduced = keys.choice(f"{FSDP}.mixed_precision.reduce_dtype", _DTYPES) or "fp32"
    pair = (str(weights), str(compute))
    if pair not in _PRECISIONS:
        keys.refuse(f"{FSDP}.model_dtype", f"{pair[0]} with {pair[1]} compute is not modelled")
    found.fields["precision"] = _PRECISIONS[pair]
    if engine in ("fsdp", "fsdp1"):
        found.options["reduce_dtype"] = reduced
        if compute != "fp32":
            found.options["autocast"] = True


def _read_model(keys: Keys, found: Found) -> None:
    checkpoints = keys.flag(f"{MODEL}.enable_gradient_checkpointing")
    found.fields["checkpointing"] = "full" if checkpoints else "none"
    if keys.flag(f"{MODEL}.enable_activation_offload"):
        if checkpoints:
            found.fields["offload_activations"] = "checkpoints"
        else:
            found.notes.append(
                f"{MODEL}.enable_activation_offload moves saved activations to the CPU, which is not "
                "modelled without checkpointing: the figures are upper bounds"
            )
    attention = keys.choice(f"{MODEL}.override_config.attn_implementation", _ATTENTION)
    if attention is not None:
        found.fields["attention"] = attention
    if keys.flag(f"{MODEL}.use_liger"):
        found.fields |= {"norm": "liger", "mlp": "fused", "rotary": "liger"}
    if keys.flag(f"{MODEL}.use_remove_padding"):
        found.fields["packing"] = "padding_free"
    if keys.flag(f"{ACTOR}.freeze_vision_tower"):
        found.fields["freeze"] = "vision_tower"


def _read_optimizer(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """A class by its module and its name (``build_optimizer``)."""
    module = keys.text(f"{ACTOR}.optim.optimizer_impl")
    key = f"{ACTOR}.optim.optimizer"
    if module not in (None, "torch.optim") and "." not in str(keys.values.get(key, ".")):
        keys.values[key] = f"{module}.{keys.text(key)}"
    add_named_optimizer(keys, key, found, given)


UNREAD_RANK = 16
"""Of an adapter that is loaded and whose rank no file here says: TRL's default (trl/trainer/model_config.py, ``lora_r``)."""


def _read_adapter(keys: Keys, found: Found) -> None:
    rank = keys.take(f"{MODEL}.lora_rank")
    path = keys.text(f"{MODEL}.lora_adapter_path")
    if path is not None and not rank:
        rank = UNREAD_RANK
        found.notes.append(
            f"{MODEL}.lora_adapter_path: what its adapter_config.json says is not read: rank {rank} is counted"
        )
    alpha, targets = keys.number(f"{MODEL}.lora_alpha"), keys.modules(f"{MODEL}.target_modules")
    excluded = keys.modules(f"{MODEL}.exclude_modules")
    if isinstance(rank, int) and rank > 0:
        found.fields["adapter"] = lora(
            rank=rank, alpha=alpha, dropout=0.0, exclude=excluded,
            targets=targets,
        )  # fmt: skip
        # The base is cast to nothing: it is in the format that the actor's weights are loaded in.
        if found.fields["precision"] in ("bf16-mixed", "fp16-mixed"):
            found.options["frozen_dtype"] = "fp32"


# -- the job ---------------------------------------------------------------------------------------


def _read_job(keys: Keys, found: Found) -> None:
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
    job["completion_length"] = found.fields["seq_len"]
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
    if _number(found, "num_gpus") == 1:
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
    micro = _micro_batch(
        keys, found, "critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size"
    )
    most = keys.count("critic.ppo_max_token_len_per_gpu")
    dynamic = keys.take("critic.use_dynamic_bsz")
    ranks = keys.count("critic.ulysses_sequence_parallel_size") or 1
    if ranks != _number(found, "context_parallel"):
        found.notes.append(
            f"critic.ulysses_sequence_parallel_size {ranks}: its sequences are counted as shared by the "
            "actor's number of ranks"
        )
    if dynamic is None:
        dynamic = keys.flag(f"{ACTOR}.use_dynamic_bsz")
    if dynamic and most is not None:
        micro = min(most * ranks // _number(found, "seq_len"), _mini_batch(keys, found, ranks)) or 1
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
    share = max(share, _reward_share(keys, found, sleeps=sleeps))
    if _generates_apart(keys):
        found.notes.append(
            f"{ROLLOUT}.name {engine} generates on GPUs of its own, which are not counted"
        )
        return {"rollout": "server"}
    if engine == "hf":
        return {"rollout": "hf"}
    if engine not in _COLOCATED:
        if engine is not None:
            found.left_out.append(f"{ROLLOUT}.name {engine} (its share of the GPUs)")
        return {"rollout": "server"} if engine is not None else {}
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


def _generates_apart(keys: Keys) -> bool:
    """Whether the engine has GPUs of its own (``one_step_off_policy``, ``fully_async_policy``)."""
    apart = keys.take("rollout.n_gpus_per_node"), keys.take("actor_rollout_ref.hybrid_engine")
    return keys.has("async_training") or apart[0] is not None or apart[1] is False


def _reward_share(keys: Keys, found: Found, *, sleeps: bool) -> float:
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
    micro, length = _number(found, "micro_batch_size"), _number(found, "seq_len")
    sizes = []
    for place in (ROLLOUT, REFERENCE):
        own = _micro_batch(
            keys, found, f"{place}.log_prob_micro_batch_size_per_gpu",
            f"{place}.log_prob_micro_batch_size",
        )  # fmt: skip
        most = _tokens_at_once(keys, place)
        dynamic = keys.take(f"{place}.log_prob_use_dynamic_bsz")
        if dynamic is None:
            dynamic = keys.flag(f"{ACTOR}.use_dynamic_bsz")
        if dynamic:
            tokens = (most or 0) * _number(found, "context_parallel")
            # What the actor's lengths were rounded by makes no sequence of its own.
            own = max(1, -(-(tokens - micro + 1) // length)) if most is not None else micro
        sizes.append(own)
    given = [size for size in sizes if size is not None]
    all_of_them = _generated(keys, found, _number(found, "context_parallel"))
    return max(1, min(max(given), all_of_them or max(given))) if given else micro
