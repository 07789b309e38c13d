"""LLaMA-Factory's trainers under Megatron-core: ROLL's mcore_adapter and Megatron Bridge.

An environment variable says which of them runs (``USE_MCA``, ``USE_MEGATRON_BRIDGE``), and the file does where it has
keys of the bridge's alone. Both make transformers' checkpoints into Megatron-core's modules and step its optimizer.
Source: LLaMA-Factory ff6d4d1, ``hparams/megatron_bridge_args.py``, ``train/megatron_bridge/config_builder.py``; ROLL's
``mcore_adapter``, ``training_args.py``, ``trainer/trainer.py`` and ``models/model_config.py``.
"""

from collections.abc import Mapping
from math import lcm

from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import num_layers
from memplan.sources.stacks.megatron import recomputation, stage_layers
from memplan.sources.trainer.keys import arguments_table, moves_memory

_DEGREES = {
    "tensor_model_parallel_size": "tensor_parallel", "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel", "expert_model_parallel_size": "expert_parallel",
}  # fmt: skip
_MARKS = frozenset({*_DEGREES, "virtual_pipeline_model_parallel_size", "recompute_granularity"})
_OF_BRIDGE = frozenset({
    "mixed_precision", "use_packed_sequences", "megatron_pretrained_checkpoint", "export_hf_on_finish", "extra_config",
})  # fmt: skip
_OVERLAPS = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Off in mcore_adapter unless they are asked for, on in the bridge."""
_FUSIONS = {
    "masked_softmax_fusion": ("masked_softmax_fusion",), "apply_rope_fusion": ("apply_rope_fusion",),
    "bias_activation_fusion": ("bias_gelu_fusion", "bias_swiglu_fusion"),
    "cross_entropy_loss_fusion": ("cross_entropy_loss_fusion",),
}  # fmt: skip
"""Keys, and the engine's options that they say: ``TransformerConfig`` fuses nothing by itself."""
_UNFUSED = ("gradient_accumulation_fusion", "bias_dropout_fusion")
"""The first needs Apex, without which the bridge leaves it off (``_apply_fusion_safety``)."""
_FUSED_IN_BRIDGE = ("masked_softmax_fusion", "cross_entropy_loss_fusion")
"""Of ``GPTModelProvider`` (Megatron-Bridge 0254ddd, ``models/gpt_provider.py``)."""
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_OPTIMIZERS = {"adam": "adamw-fused", "sgd": "sgd-momentum"}
"""Megatron-core's own."""


def is_megatron(keys: Keys) -> bool:
    """Whether the file says how Megatron-core splits the model, and does not turn it off (ROLL's ``use_mca``)."""
    if keys.has("use_mca"):
        return keys.flag("use_mca")
    return bool(_MARKS & keys.values.keys())


def read_megatron(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put engine, degrees, states and layers into ``found``; the model, the job and its lengths are read already."""
    is_bridge = bool(_OF_BRIDGE & keys.values.keys())
    name, variable = (
        ("Megatron Bridge", "USE_MEGATRON_BRIDGE") if is_bridge else ("mcore_adapter", "USE_MCA")
    )
    found.notes.append(f"counted is the trainer of {name} ({variable}=1)")
    _read_trained(keys, found, name, is_bridge=is_bridge)
    found.fields["engine"] = "megatron"
    found.fields["micro_batch_size"] = keys.count("per_device_train_batch_size") or 1
    found.fields["gradient_accumulation_steps"] = keys.count("gradient_accumulation_steps") or 1
    _read_degrees(keys, found, given)
    _read_stages(keys, found)
    _read_states(keys, found, is_bridge=is_bridge)
    _read_layers(keys, found, is_bridge=is_bridge)
    _pass_over_arguments(keys, found)


def _read_trained(keys: Keys, found: Found, name: str, *, is_bridge: bool) -> None:
    """All weights, unless the bridge fine-tunes, or ROLL's own program runs (``examples/train/run_train.py``).

    These two make adapters; LLaMA-Factory's ``train/mca/workflow.py`` asks ``finetuning_type`` nowhere.
    """
    kind = keys.text("finetuning_type") or "lora"
    adapts = (is_bridge and keys.text("stage") != "pt") or keys.has("use_mca")
    if kind != "full" and adapts:
        keys.refuse(
            "finetuning_type",
            f"{kind!r:.40} under Megatron is not modelled: say full, or leave out what only Megatron reads "
            f"({', '.join(sorted((_MARKS | _OF_BRIDGE | {'use_mca'}) & keys.values.keys()))})",
        )
    if kind != "full":
        found.notes.append(
            f"finetuning_type {kind}: {name} makes no adapters and freezes no layers here; all weights are trained, "
            "and counted"
        )
    if keys.flag("freeze_language_model"):
        keys.refuse(
            "freeze_language_model", "frozen layers under Megatron are not modelled; false is"
        )


def _read_degrees(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    degrees = {field: keys.count(key) or 1 for key, field in _DEGREES.items()}
    found.fields |= {field: degree for field, degree in degrees.items() if degree > 1}
    if keys.flag("sequence_parallel") and degrees["tensor_parallel"] > 1:
        found.fields["sequence_parallel"] = True
    split = keys.count("expert_tensor_parallel_size")
    if degrees["expert_parallel"] > 1 and split is not None:
        found.options["expert_tensor_parallel_size"] = split
    if "num_gpus" in given or "num_gpus" in found.fields:
        return
    experts = degrees["expert_parallel"] * (split or degrees["tensor_parallel"])
    shared = degrees["tensor_parallel"] * degrees["context_parallel"]
    fewest = degrees["pipeline_parallel"] * lcm(
        shared, experts if degrees["expert_parallel"] > 1 else 1
    )
    found.fields["num_gpus"] = fewest
    found.notes.append(f"{fewest} GPUs, the fewest that its degrees need, unless you say others")


def _read_stages(keys: Keys, found: Found) -> None:
    """Chunks of a rank; a stage with the embedding or the loss has a layer less where that is asked for."""
    chunks = keys.count("virtual_pipeline_model_parallel_size") or 1
    ranks = found.fields.get("pipeline_parallel", 1)
    counted = (keys.flag(_COUNTED[0]), keys.flag(_COUNTED[1]))
    if not isinstance(ranks, int) or ranks == 1:
        return
    if chunks > 1:
        found.fields |= {"virtual_stages": chunks, "pipeline_schedule": "interleaved-1f1b"}
    layers = None if found.model is None else num_layers(found.model)
    if layers is not None and chunks == 1 and any(counted):
        found.fields["layers_per_stage"] = stage_layers(
            layers, ranks, ends=(None, None), counted=counted
        )


def _read_states(keys: Keys, found: Found, *, is_bridge: bool) -> None:
    """Gradients in fp32 beside 16-bit weights, and an optimizer with masters of its own (``OptimizerConfig``)."""
    half = next((name for name in ("bf16", "fp16") if keys.flag(name)), None)
    mixed = keys.text("mixed_precision")
    if mixed not in (None, "bf16_mixed", "bf16"):
        keys.refuse("mixed_precision", f"{mixed!r:.40} is not modelled; bf16_mixed is")
    found.fields["precision"] = "fp32" if half is None else f"{half}-master"
    for name in _OVERLAPS:
        value = keys.take(name)
        found.options[name] = is_bridge if value is None else bool(value)
    optimizer = keys.text("optimizer") or "adam"
    if optimizer not in _OPTIMIZERS:
        keys.refuse("optimizer", f"{optimizer!r:.40} is not modelled; adam and sgd are")
    found.fields["optimizer"] = _OPTIMIZERS[optimizer]
    if keys.flag("optimizer_cpu_offload"):
        found.notes.append(
            "optimizer_cpu_offload keeps states in CPU RAM, which is not modelled under Megatron: the figures are "
            "upper bounds"
        )
    size = keys.count("ddp_bucket_size")
    if size is not None:
        found.options["ddp_bucket_size"] = size
    found.options["make_vocab_size_divisible_by"] = (
        1  # ``padded_vocab_size`` is the checkpoint's own
    )


def _read_layers(keys: Keys, found: Found, *, is_bridge: bool) -> None:
    """What is computed again, what is fused, and how experts are run."""
    kind, method = keys.text("recompute_granularity"), keys.text("recompute_method")
    count = keys.count("recompute_num_layers")
    if (kind, method, count) == ("full", None, None):
        method, count = "uniform", 1  # model_config.py, ``__post_init__``
    modules = keys.names("recompute_modules")
    recomputation(
        found, kind=kind, method=method, count=count,
        modules=None if modules in ((), ("core_attn",)) else modules,
    )  # fmt: skip
    found.options |= dict.fromkeys(_UNFUSED, False)
    for name, options in _FUSIONS.items():
        value = keys.take(name)
        fuses = is_bridge and name in _FUSED_IN_BRIDGE if value is None else bool(value)
        found.options |= dict.fromkeys(options, fuses)
    if keys.flag("moe_layer_recompute"):
        found.notes.append(
            "moe_layer_recompute computes experts again, which is not modelled: the figures are upper bounds"
        )
    gathers = keys.text("moe_token_dispatcher_type") in (None, "allgather")
    if gathers and "expert_parallel" in found.fields:
        found.left_out.append(
            "moe_token_dispatcher_type allgather (the tokens of all ranks, which each gathers)"
        )
    if keys.flag("sequence_packing") or keys.flag("use_packed_sequences"):
        found.notes.append("packed rows are counted as one sequence each")


def _pass_over_arguments(keys: Keys, found: Found) -> None:
    """transformers' training arguments that neither trainer asks: its own engines, optimizers and checkpointing."""
    table = arguments_table()
    left = (keys.values.keys() & {*table.fates, *table.renamed}) - keys.used
    keys.used |= left
    found.quiet += sorted(name for name in left if not moves_memory(name))
    idle = sorted(filter(moves_memory, left))
    if idle:
        found.notes.append(f"do nothing under Megatron: {', '.join(idle)}")
