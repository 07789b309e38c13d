"""Arguments of Megatron-LM's ``pretrain_gpt.py`` (main d98e8a64 and core 0.16).

``megatron/training/arguments.py`` reads them, most of them out of ``TransformerConfig`` and its
kin. Learning rate, data and checkpoints are left to the training script.
"""

from collections.abc import Mapping

from memplan.fast_dataclass import replace
from memplan.model.spec import ModelSpec
from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.sources.emitters.megatron_shape import shape_arguments
from memplan.training.choices import Recomputation, checkpointing_text
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import AttentionKernel
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.megatron import TransformerImpl

Arguments = dict[str, object]
"""Names without dashes before them; True for one that takes no value."""

_PRECISIONS: Mapping[Precision, Arguments] = {
    Precision.BF16_MASTER: {"bf16": True}, Precision.FP16_MASTER: {"fp16": True},
    Precision.FP32: {},
}  # fmt: skip
_RECIPES: Mapping[Fp8Recipe, Arguments] = {
    Fp8Recipe.NONE: {},
    **{
        recipe: {"fp8-format": "hybrid", "fp8-recipe": name}
        for recipe, name in (
            (Fp8Recipe.DELAYED, "delayed"), (Fp8Recipe.CURRENT, "tensorwise"),
            (Fp8Recipe.BLOCKWISE, "blockwise"), (Fp8Recipe.MXFP8, "mxfp8"),
        )
    },
}  # fmt: skip
_OPTIMIZERS: Mapping[Optimizer, Arguments] = {
    Optimizer.ADAMW_FUSED: {"optimizer": "adam"},
    Optimizer.SGD: {"optimizer": "sgd", "sgd-momentum": 0.0},
    Optimizer.SGD_MOMENTUM: {"optimizer": "sgd", "sgd-momentum": 0.9},
}
_FLAGS = (
    "use_distributed_optimizer", "use_precision_aware_optimizer", "grad_reduce_in_bf16",
    "overlap_grad_reduce", "overlap_param_gather", "distribute_saved_activations",
    "ddp_pad_buckets_for_high_nccl_busbw", "attention_softmax_in_fp32", "cross_entropy_loss_fusion",
)  # fmt: skip
"""Options of the engine that are arguments without a value."""
_SWITCHES = {
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "no-masked-softmax-fusion", "bias_gelu_fusion": "no-bias-gelu-fusion",
    "bias_swiglu_fusion": "no-bias-swiglu-fusion", "bias_dropout_fusion": "no-bias-dropout-fusion",
    "apply_rope_fusion": "no-rope-fusion",
}  # fmt: skip
"""Options that are on, and the arguments that switch them off."""
_VALUES = (
    "ddp_bucket_size", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "transformer_impl", "make_vocab_size_divisible_by", "cross_entropy_fusion_impl",
)  # fmt: skip
"""Options of the engine that are arguments of the same name."""
_RECOMPUTATION = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
)  # fmt: skip


def emit(setup: TrainingSetup, model: ModelSpec) -> Emitted:
    """Write the arguments of a model and a setup that Megatron-LM runs."""
    if setup.chosen_engine is not Engine.MEGATRON:
        msg = (
            f"pretrain_gpt.py is for the engine megatron, not {setup.chosen_engine.value}; name it: "
            "`engine='megatron'`"
        )
        raise refuse(msg)
    if setup.chosen_precision not in _PRECISIONS:
        known = ", ".join(each.value for each in _PRECISIONS)
        msg = f"Megatron-LM has no precision {setup.chosen_precision.value}; it has {known}"
        raise refuse(msg)
    optimizer = _OPTIMIZERS.get(setup.optimizer)
    if optimizer is None:
        known = ", ".join(each.value for each in _OPTIMIZERS)
        msg = f"Megatron-LM is not written for {setup.optimizer.value}; it is for {known}"
        raise refuse(msg)
    shape = shape_arguments(model, setup)
    values = {
        **shape,
        **degrees(setup, model),
        **batch_arguments(setup),
        **_PRECISIONS[setup.chosen_precision],
        **_narrow(setup),
        **optimizer,
        **_engine_options(setup),
        **recomputation(setup),
        **_attention(setup),
    }
    share = shape["hidden-dropout"]
    if isinstance(share, float) and shape["attention-dropout"] == share:
        setup = replace(setup, dropout=share)
    setup = replace(setup, layers_per_stage=_laid(setup, model.num_layers))
    return Emitted(values=values, setup=setup, notes=_notes(setup, model))


def _narrow(setup: TrainingSetup) -> Arguments:
    """Products in 8 bits."""
    found = _RECIPES.get(setup.fp8)
    if found is None:
        known = ", ".join(each.value for each in _RECIPES if each is not Fp8Recipe.NONE)
        msg = f"Megatron-LM is not written for {setup.fp8.value}; it is for {known}"
        raise refuse(msg)
    return found


def degrees(setup: TrainingSetup, model: ModelSpec) -> Arguments:
    """How the model is split; degrees of 1 are left out, but those that people look for."""
    values: Arguments = {
        "tensor-model-parallel-size": setup.tensor_parallel,
        "pipeline-model-parallel-size": setup.pipeline_parallel,
    }
    if setup.sequence_parallel:
        values["sequence-parallel"] = True
    if setup.context_parallel > 1:
        values["context-parallel-size"] = setup.context_parallel
    if setup.expert_parallel > 1:
        values |= {
            "expert-model-parallel-size": setup.expert_parallel,
            "expert-tensor-parallel-size": 1,
        }
    if setup.pipeline_parallel > 1:
        values |= _stages(setup, model.num_layers)
    return values


def _stages(setup: TrainingSetup, num_layers: int) -> Arguments:
    """How layers lie on stages, where Megatron would not lay them so by itself."""
    counts = _laid(setup, num_layers)
    if counts is not None:
        return {"pipeline-model-parallel-layout": layout_text(list(counts))}
    if setup.virtual_stages == 1:
        return {}
    chunks = setup.pipeline_parallel * setup.virtual_stages
    return {"num-layers-per-virtual-pipeline-stage": num_layers // chunks}


def _laid(setup: TrainingSetup, num_layers: int) -> tuple[int, ...] | None:
    """Layers of each stage, as asked or because not all have as many; None: Megatron lays them so by itself."""
    chunks = setup.pipeline_parallel * setup.virtual_stages
    if setup.layers_per_stage is not None or num_layers % chunks == 0:
        return setup.layers_per_stage
    least, more = divmod(num_layers, chunks)
    return tuple(least + (number < more) for number in range(chunks))


def layout_text(counts: list[int]) -> str:
    """Layers of each stage as ``--pipeline-model-parallel-layout`` has them, in quotes for a shell.

    >>> layout_text([7, 8, 8, 7])
    '"Et*7|t*8|t*8|t*7L"'
    """
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return f'"{"|".join(stages)}"'


def batch_arguments(setup: TrainingSetup) -> Arguments:
    """Sequences of a micro-batch and of a step, and tokens of one."""
    sequences = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel
    values: Arguments = {
        "micro-batch-size": setup.micro_batch_size, "global-batch-size": sequences,
    }  # fmt: skip
    if setup.seq_len is not None:
        values["seq-length"] = setup.seq_len
    return values


def recomputation(setup: TrainingSetup) -> Arguments:
    """``--recompute-*``: the engine's own options, or what ``checkpointing`` says."""
    options = dict(setup.engine_options)
    own = {name: options[name] for name in _RECOMPUTATION if name in options}
    if own:
        return {_dashed(name): _worded(value) for name, value in own.items()}
    value = setup.checkpointing
    if value is Recomputation.NONE:
        return {}
    if value is Recomputation.SELECTIVE:
        return {"recompute-granularity": "selective"}
    if value is Recomputation.FULL:
        return _full("uniform", 1)
    first = _first_layers(value)
    if first is None or setup.pipeline_parallel > 1:
        msg = (
            "Megatron recomputes the first layers of each stage: say recompute_method=block and "
            f"recompute_num_layers as engine options instead of {checkpointing_text(value)}"
        )
        raise refuse(msg)
    return _full("block", first)


def _first_layers(value: object) -> int | None:
    """How many of the first layers are named; None for others, and for a share."""
    if not isinstance(value, CheckpointedLayers):
        return None
    for count in range(1, MOST_LAYERS):
        if value == CheckpointedLayers.first(count):
            return count
    return None


MOST_LAYERS = 1000


def _full(method: str, num_layers: int) -> Arguments:
    return {
        "recompute-granularity": "full", "recompute-method": method,
        "recompute-num-layers": num_layers,
    }  # fmt: skip


def _engine_options(setup: TrainingSetup) -> Arguments:
    options = dict(setup.engine_options)
    values: Arguments = {}
    if options.get("transformer_impl") in (TransformerImpl.KWAI, TransformerImpl.KWAI.value):
        msg = "Megatron-LM has no transformer_impl kwai: its fork's arguments are others"
        raise refuse(msg)
    for name, value in options.items():
        if name in _FLAGS:
            if value is True:
                values[_dashed(name)] = True
        elif name in _SWITCHES:
            if value is False:
                values[_SWITCHES[name]] = True
        elif name in _VALUES:
            values[_dashed(name)] = _worded(value)
        elif name not in _RECOMPUTATION:
            msg = f"no argument of Megatron-LM is known for the option {name}: leave it out"
            raise refuse(msg)
    return values


def _attention(setup: TrainingSetup) -> Arguments:
    backends = {
        AttentionKernel.FLASH: "flash", AttentionKernel.FLASH3: "flash",
        AttentionKernel.EAGER: "unfused",
    }  # fmt: skip
    backend = backends.get(setup.chosen_kernels.attention)
    return {} if backend is None else {"attention-backend": backend}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _worded(value: object) -> object:
    """Several values stand behind one another."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def _notes(setup: TrainingSetup, model: ModelSpec) -> tuple[str, ...]:
    return (
        f"launch it on {setup.num_gpus} GPUs, nodes: {setup.nodes}",
        f"data, learning rate and checkpoints of {model.name}",
    )
