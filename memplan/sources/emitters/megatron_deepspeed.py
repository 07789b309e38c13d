"""Megatron-DeepSpeed's arguments (``pretrain_gpt.py`` of 4efb479d) and the ``ds_config.json`` beside them.

Its ``megatron/arguments.py`` is an older Megatron-LM's with DeepSpeed's additions; what it has no
argument for is refused.
"""

import json
from collections.abc import Mapping

from memplan.model.spec import ModelSpec
from memplan.sources.emitters.deepspeed import config
from memplan.sources.emitters.emitted import Beside, Emitted, refuse
from memplan.sources.emitters.megatron import batch_arguments
from memplan.sources.emitters.megatron_shape import shape_arguments
from memplan.training.choices import Recomputation, ZeroStage, checkpointing_text
from memplan.training.choices_of_kernels.kernels import AttentionKernel
from memplan.training.precision import Precision
from memplan.training.setup import TrainingSetup

CONFIG_NAME = "ds_config.json"
_PRECISIONS: Mapping[Precision, dict[str, object]] = {
    Precision.BF16_MASTER: {"bf16": True}, Precision.FP16_MASTER: {"fp16": True},
    Precision.FP32: {},
}  # fmt: skip
_NAMES = {
    **{
        name: name
        for name in (
            "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels",
            "swiglu", "squared-relu", "disable-bias-linear", "num-experts", "vocab-size",
            "untie-embeddings-and-output-weights", "attention-dropout", "hidden-dropout",
            "max-position-embeddings", "rotary-percent",
        )
    },
    "num-query-groups": "num-key-value-heads", "moe-router-topk": "topk",
}  # fmt: skip
"""Megatron-LM's arguments of a shape, and what they are called here."""
_SAID_OTHERWISE = frozenset({
    "group-query-attention", "normalization", "position-embedding-type", "moe-ffn-hidden-size",
    "moe-grouped-gemm", "moe-token-dispatcher-type", "moe-router-score-function",
})  # fmt: skip


def emit(setup: TrainingSetup, model: ModelSpec) -> Emitted:
    """Write the arguments, and the configuration that goes with them."""
    values = config(setup)
    for name in ("tensor_parallel", "sequence_parallel_size"):
        values.pop(name, None)  # which arguments say
    values.pop("optimizer")  # Megatron-DeepSpeed makes its own, by --optimizer and --cpu-optimizer
    arguments = {
        **_shape(model, setup),
        **_degrees(setup),
        **batch_arguments(setup),
        **_PRECISIONS[setup.chosen_precision],
        **_recomputation(setup),
        "deepspeed": True,
        "deepspeed_config": CONFIG_NAME,
        "zero-stage": (setup.zero_stage or ZeroStage.NONE).value,
    }
    if setup.chosen_kernels.attention is AttentionKernel.FLASH:
        arguments["use-flash-attn-v2"] = True
    if setup.offload_optimizer.value != "none":
        arguments["cpu-optimizer"] = True
    return Emitted(
        values=arguments,
        setup=setup,
        notes=(
            f"launch it on {setup.num_gpus} GPUs, nodes: {setup.nodes}",
            f"data, tokenizer, learning rate and checkpoints of {model.name}",
        ),
        beside=Beside(name=CONFIG_NAME, text=json.dumps(values, indent=2)),
    )


def _degrees(setup: TrainingSetup) -> dict[str, object]:
    values: dict[str, object] = {
        "tensor-model-parallel-size": setup.tensor_parallel,
        "pipeline-model-parallel-size": setup.pipeline_parallel,
    }
    if setup.pipeline_parallel == 1:
        values["no-pipeline-parallel"] = True
    elif setup.virtual_stages > 1:
        msg = "Megatron-DeepSpeed's pipeline has no virtual stages: leave virtual_stages out"
        raise refuse(msg)
    if setup.sequence_parallel:
        values["sequence-parallel"] = True
    if setup.context_parallel > 1:
        if setup.sequence_parallel:
            msg = (
                "Megatron-DeepSpeed splits sequences by Ulysses or by Megatron's sequence parallel, "
                "not by both: give context_parallel or sequence_parallel"
            )
            raise refuse(msg)
        values["ds-sequence-parallel-size"] = setup.context_parallel
    if setup.expert_parallel > 1:
        values["moe-expert-parallel-size"] = setup.expert_parallel
    return values


def _shape(model: ModelSpec, setup: TrainingSetup) -> dict[str, object]:
    given = shape_arguments(model, setup)
    unknown = [name for name in given if name not in _NAMES and name not in _SAID_OTHERWISE]
    if unknown:
        msg = (
            f"Megatron-DeepSpeed has no --{unknown[0]}, which {model.name} needs; emit megatron has"
        )
        raise refuse(msg)
    values = {_NAMES[name]: value for name, value in given.items() if name in _NAMES}
    values["normalization"] = str(given["normalization"]).lower()
    if given["position-embedding-type"] == "rope":
        values["use-rotary-position-embeddings"] = True
    if "num-experts" in values:
        if given["moe-ffn-hidden-size"] != given["ffn-hidden-size"]:
            msg = "Megatron-DeepSpeed's experts are as wide as its dense networks"
            raise refuse(msg)
        values["expert-interval"] = 1
    return values


def _recomputation(setup: TrainingSetup) -> dict[str, object]:
    value = setup.checkpointing
    if value is Recomputation.NONE:
        return {}
    if value is Recomputation.SELECTIVE:
        return {"recompute-granularity": "selective"}
    if value is not Recomputation.FULL:
        msg = (
            f"Megatron-DeepSpeed checkpoints all layers or none, not {checkpointing_text(value)}: "
            "choose full"
        )
        raise refuse(msg)
    return {"checkpoint-activations": True, "deepspeed-activation-checkpointing": True}
