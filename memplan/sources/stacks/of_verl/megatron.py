"""Megatron-core as verl runs it: the actor's steps, and what of its job beside them is not counted.

Layers are those of mbridge, which fuses less than Megatron-LM's own programs do. Source: verl b178a3cd5,
``utils/megatron_utils.py`` (``make_megatron_module``), ``utils/megatron/optimizer.py``, ``models/mcore/util.py``;
mbridge ``core/llm_bridge.py`` (``_build_base_config``); Megatron-core ``transformer/transformer_config.py``.
"""

from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import model_type, num_layers
from memplan.sources.stacks.megatron import recomputation, stage_layers
from memplan.sources.stacks.of_verl.job import generates_apart, reward_share
from memplan.sources.stacks.of_verl.places import (
    ACTOR,
    DTYPES,
    MEGATRON,
    MODEL,
    REFERENCE,
    ROLLOUT,
    number,
)
from memplan.units import round_up

LAYERS = f"{MEGATRON}.override_transformer_config"
_DEGREES = {
    "tensor_model_parallel_size": "tensor_parallel", "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel", "expert_model_parallel_size": "expert_parallel",
}  # fmt: skip
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Of the first and of the last stage."""
_FUSING = frozenset(
    {"qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_vl", "qwen3_vl_moe"}
)
"""Types whose bridges fuse biases with what follows them (mbridge ``models``)."""
_OPTIMIZERS = {"adam": "adamw-fused", "adamw": "adamw-fused", "sgd": "sgd-momentum"}
"""Megatron's own, under the names that verl's file has for them; of SGD the momentum is 0.9 (``OptimizerConfig``)."""


def is_megatron(keys: Keys) -> bool:
    """Whether the actor runs under it: its strategy says so, or the defaults that the file is laid over."""
    key = f"{ACTOR}.strategy"
    if key in keys.values:
        return keys.values[key] == "megatron"
    defaults = keys.values.get("defaults")
    keys.used.add("defaults")
    each = [str(name) for name in defaults] if isinstance(defaults, list) else []
    return any("megatron" in name for name in each)


def read_megatron(keys: Keys, found: Found) -> None:
    """Put the engine, its degrees and its layers into ``found``."""
    keys.take(f"{ACTOR}.strategy")
    found.fields["engine"] = "megatron"
    for name in ("packing", "attention"):  # of layers that are not run: Megatron's have their own
        found.fields.pop(name, None)
    dtype = keys.choice(f"{MEGATRON}.dtype", DTYPES) or "bf16"
    found.fields["precision"] = f"{dtype}-master"
    _read_optimizer(keys, found)
    _read_stages(keys, found)
    _read_fusions(keys, found)
    if keys.on(f"{MODEL}.lora.rank") or keys.on(f"{MODEL}.lora_rank"):
        keys.refuse(f"{MODEL}.lora.rank", "adapters under Megatron are not modelled")
    granularity, modules = (
        keys.text(f"{LAYERS}.recompute_granularity"), keys.names(f"{LAYERS}.recompute_modules"),
    )  # fmt: skip
    recomputation(
        found, kind=granularity, method=keys.text(f"{LAYERS}.recompute_method"),
        count=keys.count(f"{LAYERS}.recompute_num_layers"),
        modules=None if modules == ("core_attn",) else modules or None,
    )  # fmt: skip
    backend = keys.text(f"{LAYERS}.attention_backend")
    if backend in ("unfused", "local"):
        found.left_out.append(f"attention_backend {backend} (scores that it keeps)")


def read_degrees(keys: Keys, found: Found) -> None:
    """Over how many ranks layers, stages, sequences and experts are spread."""
    for name, field in _DEGREES.items():
        degree = keys.count(f"{MEGATRON}.{name}") or 1
        if degree > 1:
            found.fields[field] = degree
    if (
        keys.take(f"{MEGATRON}.sequence_parallel") is not False
        and "tensor_parallel" in found.fields
    ):
        found.fields["sequence_parallel"] = True
    split = keys.count(f"{MEGATRON}.expert_tensor_parallel_size")
    if "expert_parallel" in found.fields and split is not None:
        found.options["expert_tensor_parallel_size"] = split


def _read_optimizer(keys: Keys, found: Found) -> None:
    """States in fp32, over the ranks of data where it is the distributed one."""
    found.options["use_distributed_optimizer"] = (
        keys.take(f"{MEGATRON}.use_distributed_optimizer") is not False
    )
    name = str(keys.text(f"{ACTOR}.optim.optimizer") or "adam").lower()
    if name not in _OPTIMIZERS:
        keys.refuse(f"{ACTOR}.optim.optimizer", f"{name!r:.40} is not modelled; adam and sgd are")
    found.fields["optimizer"] = _OPTIMIZERS[name]
    own = f"{ACTOR}.optim.override_optimizer_config"
    if keys.flag(f"{own}.optimizer_cpu_offload"):
        share = keys.number(f"{own}.optimizer_offload_fraction")
        found.notes.append(
            f"{own}.optimizer_cpu_offload keeps {share:g} of the optimizer's states in CPU RAM, which is not modelled "
            "under Megatron: the figures are upper bounds"
        )
    if keys.flag(f"{own}.use_precision_aware_optimizer"):
        found.options["use_precision_aware_optimizer"] = True
    if found.fields["precision"] == "fp16-master":
        found.options |= {"use_precision_aware_optimizer": True, "store_param_remainders": False}


def _read_stages(keys: Keys, found: Found) -> None:
    """Chunks of a rank, and how many layers the first and the last stage have."""
    ranks = number(found, "pipeline_parallel")
    chunks = keys.count(f"{MEGATRON}.virtual_pipeline_model_parallel_size") or 1
    ends = [keys.count(f"{LAYERS}.{name}") for name in _ENDS]
    counts_as_layer = [keys.flag(f"{LAYERS}.{name}") for name in _COUNTED]
    if ranks == 1:
        return
    if chunks > 1:
        found.fields |= {"virtual_stages": chunks, "pipeline_schedule": "interleaved-1f1b"}
        if keys.flag(f"{ACTOR}.use_dynamic_bsz"):
            # ``rearrange_micro_batches`` makes as many as go in rounds of a micro-batch a rank.
            steps = number(found, "gradient_accumulation_steps")
            found.fields["gradient_accumulation_steps"] = round_up(steps, ranks)
    layers = None if found.model is None else num_layers(found.model)
    if layers is not None and chunks == 1 and (any(ends) or any(counts_as_layer)):
        found.fields["layers_per_stage"] = stage_layers(
            layers, ranks, ends=(ends[0], ends[1]),
            counted=(counts_as_layer[0], counts_as_layer[1]),
        )  # fmt: skip


def _read_fusions(keys: Keys, found: Found) -> None:
    """``TransformerConfig`` fuses nothing by itself, the bridge softmax, some models' bridges biases too."""
    fuses = model_type(found.model) in _FUSING
    defaults = {
        "gradient_accumulation_fusion": False, "masked_softmax_fusion": True,
        "apply_rope_fusion": False, "bias_activation_fusion": fuses, "bias_dropout_fusion": fuses,
    }  # fmt: skip
    for name, default in defaults.items():
        own = keys.take(f"{LAYERS}.{name}")
        value = default if own is None else bool(own)
        names = [name]
        if name == "bias_activation_fusion":
            names = ["bias_gelu_fusion", "bias_swiglu_fusion"]
        found.options |= dict.fromkeys(names, value)


def read_company(keys: Keys, found: Found) -> None:
    """Name what lies beside the actor: no job is modelled under this engine, the actor's steps alone are counted."""
    found.notes.append(
        "Megatron: counted are the actor's steps, not the passes that score answers nor the job around them"
    )
    offloads = keys.flag(f"{MEGATRON}.param_offload")
    key = f"{REFERENCE}.megatron.param_offload"
    waits = keys.flag(key) if key in keys.values else offloads
    if (keys.flag(f"{ACTOR}.use_kl_loss") or keys.flag("algorithm.use_kl_in_reward")) and not waits:
        found.left_out.append(
            f"{key} false (the frozen reference's weights, as many as the actor's)"
        )
    estimator, enabled = keys.text("algorithm.adv_estimator") or "gae", keys.take("critic.enable")
    leaves = [keys.flag(f"critic.megatron.{name}_offload") for name in ("param", "optimizer")]
    if estimator == "gae" and enabled is not False and not all(leaves):
        found.left_out.append("critic (weights and states of a model of its own)")
    sleeps = keys.flag(f"{ROLLOUT}.free_cache_engine")
    reward_share(keys, found, sleeps=sleeps)
    share = keys.number(f"{ROLLOUT}.gpu_memory_utilization") or 0.5
    apart = generates_apart(keys)
    if keys.text(f"{ROLLOUT}.name") is not None and not sleeps and not apart:
        found.left_out.append(f"{ROLLOUT}.free_cache_engine false (its {share:g} of each GPU)")


def aligned(found: Found) -> int:
    """What verl rounds a sequence's length up to (``preprocess_packed_seqs``)."""
    context, tensor = number(found, "context_parallel"), number(found, "tensor_parallel")
    return 2 * tensor * context if context > 1 else tensor
