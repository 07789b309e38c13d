"""verl's YAML: the hydra configuration of its PPO trainer, whole or what is laid over verl's own, and of SFT.

The actor, the frozen reference and the engine that generates share the GPUs. A hydra file's ``defaults`` are verl's
own, which the preset has; a script's words are read as what they are laid over. Source: verl 0.9.1,
``workers/engine_workers.py``, ``trainer/ppo/utils.py``.
"""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.optimizer import add_named_optimizer
from memplan.sources.stacks.common.wording import lora
from memplan.sources.stacks.of_verl.fsdp import read_engine
from memplan.sources.stacks.of_verl.job import read_job
from memplan.sources.stacks.of_verl.megatron import (
    aligned,
    is_megatron,
    read_company,
    read_degrees,
    read_megatron,
)
from memplan.sources.stacks.of_verl.places import (
    ACTOR,
    MODEL,
    micro_batch,
    mini_batch,
    number,
    ranks_of_one,
)
from memplan.sources.stacks.of_verl.sft import names_engine, rename_engine_sft, rename_sft
from memplan.text import shown
from memplan.units import ceil_div

NAME = "verl"
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash3",
}  # fmt: skip
_MARKS = ("ppo_trainer", "ppo_megatron_trainer", "ppo_torchtitan_trainer", "ppo_veomni_trainer")
"""Files of verl's own that a hydra file's ``defaults`` name."""
_WHOLE = ("_trainer", "_trainer_engine", "_trainer_split")
"""How the names of its whole configurations end."""
OTHER_ENGINES = ("torchtitan", "veomni")


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
        rename_sft(keys)
    elif not keys.has("actor_rollout_ref") and (keys.has("engine") or names_engine(keys)):
        rename_engine_sft(keys, found)
    found.model = _model(keys)
    if not keys.has("sft") and is_megatron(keys):
        read_degrees(keys, found)
        _read_gpus(keys, found)
        _read_sizes(keys, found, aligned(found))
        read_megatron(keys, found)
        read_company(keys, found)
        return
    _read_gpus(keys, found)
    _read_sizes(keys, found, number(found, "context_parallel"))
    read_engine(keys, found, given)
    _read_model(keys, found)
    _read_optimizer(keys, found, given)
    _read_adapter(keys, found)
    if not keys.has("sft"):
        read_job(keys, found)


def _model(keys: Keys) -> str | None:
    """What is trained; a script that leaves it to who runs it names none."""
    key = f"{MODEL}.path"
    if str(keys.values.get(key)).startswith("${"):
        keys.used.add(key)
        return None
    return keys.model(key)


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
            engine = next((one for one in OTHER_ENGINES if one in name), None)
            if engine is not None and name.endswith(("_trainer", "_actor")):
                keys.refuse(
                    "defaults",
                    f"{name}: verl's engine {engine} is not modelled; fsdp and megatron are",
                )


def _read_gpus(keys: Keys, found: Found) -> None:
    nodes = _of_scheduler(keys, found, "trainer.nnodes", 1)
    found.fields["num_gpus"] = nodes * _of_scheduler(keys, found, "trainer.n_gpus_per_node", 8)
    found.fields["num_nodes"] = nodes
    parallel = keys.count(f"{ACTOR}.ulysses_sequence_parallel_size")
    if parallel not in (None, 1) and found.fields.get("context_parallel") is None:
        found.fields |= {"context_parallel": parallel, "context_parallel_kind": "all-to-all"}


def _of_scheduler(keys: Keys, found: Found, key: str, usual: int) -> int:
    """How many there are of something; of a script that asks its scheduler, as many as usual, and said so."""
    if str(keys.values.get(key)).startswith("${"):
        keys.used.add(key)
        found.notes.append(
            f"{key}: its scheduler says how many: counted as {usual}, unless you say others"
        )
        return usual
    return keys.count(key) or usual


def _read_sizes(keys: Keys, found: Found, multiple: int) -> None:
    """Micro-batch, length, which is a ``multiple``, and how many of them make a step."""
    prompt = keys.count("data.max_prompt_length") or 512
    answer = keys.count("data.max_response_length") or 512
    length = keys.count("data.max_length") if keys.has("sft") else None
    whole = length or prompt + answer
    most = keys.count(f"{ACTOR}.ppo_max_token_len_per_gpu")
    micro = micro_batch(
        keys, found, f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"
    )
    of_step = mini_batch(keys, found, ranks_of_one(found))
    dynamic = keys.flag(f"{ACTOR}.use_dynamic_bsz")
    if dynamic and most is not None:
        # A micro-batch is filled up with sequences, and each rank of a group has its share of them.
        tokens = most * number(found, "context_parallel")
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
    whole = _divided(whole, multiple)
    found.fields |= {"seq_len": whole, "micro_batch_size": micro}
    # What is left over of a step is a micro-batch of its own (``rearrange_micro_batches``), or verl stops at it.
    steps = ceil_div(of_step, micro) if dynamic else of_step // micro
    found.fields["gradient_accumulation_steps"] = max(1, steps)
    if not dynamic and of_step % micro and not keys.has("sft"):
        # ``fsdp_workers.py`` asserts it.
        found.notes.append(
            f"{ACTOR}.ppo_mini_batch_size: the {of_step} sequences of a GPU are no multiple of its micro-batch "
            f"of {micro}: verl stops at it on {number(found, 'num_gpus')} GPUs"
        )


def _divided(length: int, ranks: int) -> int:
    """A length that the ranks share evenly: verl pads the last of them (``ulysses_pad``)."""
    return -(-length // ranks) * ranks


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
