"""``ds_config.json``, as DeepSpeed 0.19 reads it (``runtime/config.py``, ``zero/config.py``).

The learning rate, the schedule and clipping are left to the training script. Number of GPUs,
sequence length and activation checkpointing are none of DeepSpeed's business.
"""

from collections.abc import Callable

from memplan.memory.engine_options import loads_under_zero_init
from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.training.choices import Offload, Recomputation, ZeroStage, checkpointing_text
from memplan.training.choices_of_kernels.kernels import TILED_LOSSES, WHOLE
from memplan.training.choices_of_kernels.losses import LOSS_FORMS
from memplan.training.compilation import Compilation
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

_HALF_SECTIONS = {Precision.BF16_MASTER: "bf16", Precision.FP16_MASTER: "fp16"}
_HALF_OPTIONS = frozenset({
    "immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states",
    "fp16_master_weights_and_grads",
})  # fmt: skip
"""Engine options that belong to the section of the precision."""
_OPTIMIZERS: dict[Optimizer, dict[str, object]] = {
    Optimizer.ADAMW_FUSED: {"type": "AdamW", "params": {}},
    Optimizer.ADAMW_FOREACH: {"type": "AdamW", "params": {"torch_adam": True}},
    Optimizer.SGD: {"type": "SGD", "params": {}},
    Optimizer.SGD_MOMENTUM: {"type": "SGD", "params": {"momentum": 0.9}},
    Optimizer.LION_FUSED: {"type": "Lion", "params": {}},
    Optimizer.LAMB: {"type": "Lamb", "params": {}},
    Optimizer.ADAGRAD: {"type": "Adagrad", "params": {}},
}


def emit(setup: TrainingSetup) -> Emitted:
    """Write the configuration of a setup that DeepSpeed runs.

    Raises ``SetupError`` for expert groups, which no file says.
    """
    if setup.expert_parallel > 1:
        msg = "a ds_config.json says no expert groups; deepspeed+megatron writes the arguments beside it"
        raise refuse(msg)
    return Emitted(values=config(setup), setup=setup, notes=_notes(setup))


def config(setup: TrainingSetup) -> dict[str, object]:
    """The configuration itself; ``setup`` has its defaults filled in."""
    return _sections(setup, _optimizer)


def config_for_own_optimizer(setup: TrainingSetup) -> dict[str, object]:
    """The same where the optimizer is made by who calls ``deepspeed.initialize``."""
    return _sections(setup, lambda _: {})


def _sections(
    setup: TrainingSetup, optimizer: Callable[[TrainingSetup], dict[str, object]]
) -> dict[str, object]:
    if setup.chosen_engine is not Engine.DEEPSPEED:
        msg = f"a ds_config.json is for the engine deepspeed, not {setup.chosen_engine.value}"
        raise refuse(msg)
    options = dict(setup.engine_options)
    steps = setup.gradient_accumulation_steps
    values: dict[str, object] = {
        "train_batch_size": setup.micro_batch_size * steps * setup.data_parallel,
        "train_micro_batch_size_per_gpu": setup.micro_batch_size,
        "gradient_accumulation_steps": steps,
    }
    section = _HALF_SECTIONS.get(setup.chosen_precision)
    if section is not None:
        extras = {name: options[name] for name in options if name in _HALF_OPTIONS}
        values[section] = {"enabled": True, **extras}
    if "grad_accum_dtype" in options:
        values["data_types"] = {"grad_accum_dtype": options["grad_accum_dtype"]}
    values |= optimizer(setup)
    values["zero_optimization"] = _zero(setup, options)
    if setup.tensor_parallel > 1:
        values["tensor_parallel"] = {"autotp_size": setup.tensor_parallel}
    if setup.context_parallel > 1:
        values["sequence_parallel_size"] = setup.context_parallel
    if setup.pipeline is not None:
        values["pipeline"] = _pipeline(setup)
    return values


def _optimizer(setup: TrainingSetup) -> dict[str, object]:
    """The section that DeepSpeed makes one of its own of."""
    found = _OPTIMIZERS.get(setup.optimizer)
    if found is None or setup.optimizer_options:
        more = " with optimizer_options" if setup.optimizer_options else ""
        known = ", ".join(each.value for each in _OPTIMIZERS)
        msg = (
            f"a ds_config.json is not written for {setup.optimizer.value}{more}; it is for {known}"
        )
        raise refuse(msg)
    return {"optimizer": found}


def _pipeline(setup: TrainingSetup) -> dict[str, object]:
    """The section that ``PipelineEngine`` reads; how layers are dealt is the module's argument."""
    found: dict[str, object] = {"stages": setup.pipeline_parallel}
    if setup.checkpointing is Recomputation.FULL:
        found["activation_checkpoint_interval"] = 1
    elif setup.checkpointing is not Recomputation.NONE:
        text = checkpointing_text(setup.checkpointing)
        msg = f"DeepSpeed's pipelines checkpoint all layers or none, not {text}"
        raise refuse(msg)
    return found


_ELSEWHERE = _HALF_OPTIONS | {"grad_accum_dtype", "zero_init", "partition_method"}
"""Engine options with a place outside ``zero_optimization``, or none in the file."""


def _zero(setup: TrainingSetup, options: dict[str, object]) -> dict[str, object]:
    stage = ZeroStage.GRADIENTS if setup.zero_stage is None else setup.zero_stage
    zero: dict[str, object] = {"stage": stage.value}
    offloads: dict[str, dict[str, object]] = {}
    for part, place in (
        ("offload_optimizer", setup.offload_optimizer), ("offload_param", setup.offload_param),
    ):  # fmt: skip
        if place is not Offload.NONE:
            offloads[part] = {"device": place.value}
    for name, value in options.items():
        part, dot, key = name.partition(".")
        if dot:
            offloads.setdefault(part, {})[key] = value
        elif name == "pin_memory":
            offloads.setdefault("offload_optimizer", {})[name] = value
        elif name not in _ELSEWHERE:
            zero[name] = value
    return {**zero, **offloads}


def _notes(setup: TrainingSetup) -> tuple[str, ...]:
    notes = [f"launch it on {setup.num_gpus} GPUs, nodes: {setup.nodes}"]
    if setup.seq_len is not None:
        notes.append(f"cut sequences to {setup.seq_len} tokens")
    if setup.chosen_kernels.mlp_tiles != WHOLE:
        notes.append("run the networks through deepspeed's TiledMLP")
    if setup.chosen_kernels.loss in TILED_LOSSES:
        notes.append(f"compute the loss in tiles ({LOSS_FORMS[setup.chosen_kernels.loss].source})")
    pipeline = setup.pipeline
    if pipeline is not None:
        how = pipeline.partition_method
        if pipeline.layers_per_stage is not None:
            how = f"layers {'+'.join(map(str, pipeline.layers_per_stage))}"
        notes.append(
            f"build a PipelineModule with num_stages={pipeline.degree}, partition_method: {how}, and name the "
            "decoder layer's class in checkpointable_layers"
        )
    elif setup.checkpointing is not Recomputation.NONE:
        text = checkpointing_text(setup.checkpointing)
        notes.append(f"switch on checkpointing ({text}) in the model")
    if setup.compile is Compilation.LAYER:
        notes.append("compile each layer (layer.compile()) before deepspeed.initialize")
    if setup.compile is Compilation.MODEL:
        notes.append("call engine.compile() behind deepspeed.initialize")
    if loads_under_zero_init(setup):
        notes.append("build the model inside deepspeed.zero.Init, as transformers does by itself")
    elif setup.zero_stage is ZeroStage.PARAMETERS:
        notes.append("build the model outside deepspeed.zero.Init")
    return tuple(notes)
