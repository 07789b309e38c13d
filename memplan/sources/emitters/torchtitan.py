"""torchtitan's command-line overrides (0.3.0, ``torchtitan/config``), or a TOML file of the versions before.

Overrides are laid over a configuration of torchtitan's own: ``torchrun ... -m torchtitan.train --module
llama3 --config llama3_8b`` and these flags. Up to February 2026 a file said the same, by the same names.
"""

from collections.abc import Mapping

from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.training.choices import FsdpStrategy, Offload, Recomputation, checkpointing_text
from memplan.training.compilation import Compilation
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import PipelineSchedule

_PRECISIONS = {
    Precision.BF16_MIXED: {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"},
    Precision.BF16: {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"},
    Precision.BF16_AMP: {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"},
    Precision.FP32: {"training.dtype": "float32", "training.mixed_precision_param": "float32"},
}  # fmt: skip
_IMPLEMENTATIONS = {Optimizer.ADAMW_FUSED: "fused", Optimizer.ADAMW_FOREACH: "foreach"}
_NAME = "optimizer.name"
_IMPLEMENTATION = "optimizer.implementation"
_MODE = "activation_checkpoint.mode"
"""A key of files; on the command line a policy is a word of its own, behind the flags."""
_POLICY = "activation_checkpoint.selective_ac_option"
"""Of files: matrix products by turns, or whole layers by turns."""
_LOGITS_WHOLE = "parallelism.disable_loss_parallel"
_SCHEDULES: Mapping[PipelineSchedule, str] = {
    PipelineSchedule.GPIPE: "GPipe", PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.INTERLEAVED_ONE_F_ONE_B: "Interleaved1F1B",
    PipelineSchedule.LOOPED_BFS: "LoopedBFS",
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE: "InterleavedZeroBubble",
    PipelineSchedule.ZBV: "ZBVZeroBubble", PipelineSchedule.DUALPIPEV: "DualPipeV",
}  # fmt: skip
_STAGES_OF_LOOPS = 2
"""Stages of a rank under a schedule with several, where nothing says how many."""
_RESHARDING = {FsdpStrategy.FULL_SHARD: "default", FsdpStrategy.SHARD_GRAD_OP: "never"}


def emit(setup: TrainingSetup) -> Emitted:
    """Write the flags of a setup that torchtitan can run."""
    # Of a pipeline, its micro-batches together: they are cut out of one local batch.
    in_batch = setup.gradient_accumulation_steps if setup.pipeline_parallel > 1 else 1
    values: dict[str, object] = {
        "training.local_batch_size": setup.micro_batch_size * in_batch,
        "training.global_batch_size": (
            setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel
        ),
    }
    if setup.seq_len is not None:
        values["training.seq_len"] = setup.seq_len
    values |= _precision(setup)
    values |= _parallelism(setup)
    if setup.offload_optimizer is not Offload.NONE or setup.offload_param is not Offload.NONE:
        values["training.enable_cpu_offload"] = True
    values[_MODE] = _mode(setup)
    if setup.checkpointing is Recomputation.SELECTIVE:
        values[_POLICY] = "op"
    if setup.compile is Compilation.MODEL:
        msg = "torchtitan compiles each layer on its own; choose `compile='layer'`"
        raise refuse(msg)
    if setup.compile is Compilation.LAYER:
        values |= {"compile.enable": True, "compile.components": ["model"]}
    notes = [f"launch it on {setup.num_gpus} GPUs, nodes: {setup.nodes}"]
    implementation = _IMPLEMENTATIONS.get(setup.optimizer)
    if implementation is None:
        msg = f"torchtitan's configurations have AdamW; {setup.optimizer.value} is none"
        raise refuse(msg)
    values |= {_NAME: "AdamW", _IMPLEMENTATION: implementation}
    notes.append(f"its AdamW has to be the {implementation} one, as the configuration says")
    if _LOGITS_WHOLE in values:
        notes.append("0.3.0 always splits logits over the vocabulary, and no flag says otherwise")
    return Emitted(
        values=values,
        setup=setup,
        notes=tuple(notes),
        only_in_files=frozenset({_MODE, _POLICY, _LOGITS_WHOLE, _NAME, _IMPLEMENTATION}),
        last_words=(f"activation-checkpoint:{values[_MODE]}",),
    )


def _precision(setup: TrainingSetup) -> dict[str, str]:
    precision = setup.chosen_precision
    if precision not in _PRECISIONS:
        known = ", ".join(each.value for each in _PRECISIONS)
        msg = f"torchtitan has no precision {precision.value}; it has {known}"
        raise refuse(msg)
    return _PRECISIONS[precision]


def _parallelism(setup: TrainingSetup) -> dict[str, object]:
    names = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
    degrees: dict[str, object] = {
        "parallelism.tensor_parallel_degree": setup.tensor_parallel,
        "parallelism.pipeline_parallel_degree": setup.pipeline_parallel,
        "parallelism.context_parallel_degree": setup.context_parallel,
        "parallelism.expert_parallel_degree": setup.expert_parallel,
    }
    used = {name: degree for name, degree in degrees.items() if degree != 1}
    if setup.pipeline_parallel > 1:
        used |= _pipeline(setup)
    if setup.tensor_parallel > 1:
        if not setup.sequence_parallel:
            msg = "torchtitan splits layers with sequence_parallel alone: give it beside tensor_parallel"
            raise refuse(msg)
        if not setup.loss_parallel:
            used[_LOGITS_WHOLE] = True
    engine = setup.chosen_engine
    if engine is Engine.DDP:
        return {names[0]: setup.data_parallel, names[1]: 1, **used}
    if engine is not Engine.FSDP:
        msg = f"torchtitan shards with FSDP2: choose the engine fsdp or ddp, not {engine.value}"
        raise refuse(msg)
    strategy = setup.fsdp_strategy or FsdpStrategy.FULL_SHARD
    replicas = dict(setup.engine_options).get("data_parallel_replicate_degree", 1)
    if strategy is FsdpStrategy.HYBRID and replicas == 1:
        replicas = setup.nodes
    if not isinstance(replicas, int) or strategy is FsdpStrategy.NO_SHARD:
        msg = f"torchtitan has no {strategy.value} of FSDP; use the engine ddp"
        raise refuse(msg)
    return {
        names[0]: replicas,
        names[1]: setup.data_parallel // replicas,
        "parallelism.fsdp_reshard_after_forward": _RESHARDING.get(strategy, "default"),
        **used,
    }


def _pipeline(setup: TrainingSetup) -> dict[str, object]:
    """The schedule; stages hold as many layers as torchtitan gives them."""
    schedule = setup.pipeline_schedule or PipelineSchedule.ONE_F_ONE_B
    has_loops = schedule not in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)
    usual = _STAGES_OF_LOOPS if has_loops else 1
    if setup.virtual_stages not in (1, usual):
        msg = (
            f"torchtitan makes {usual} stages of a rank under {schedule.value}, and not "
            f"{setup.virtual_stages}; others follow from pipeline_parallel_layers_per_stage"
        )
        raise refuse(msg)
    return {
        "parallelism.pipeline_parallel_schedule": _SCHEDULES[schedule],
        "parallelism.pipeline_parallel_microbatch_size": setup.micro_batch_size,
    }


def _mode(setup: TrainingSetup) -> str:
    value = setup.checkpointing
    if isinstance(value, Recomputation):
        return value.value
    shown = checkpointing_text(value)
    msg = f"torchtitan checkpoints all layers or none; {shown} cannot be said in flags"
    raise refuse(msg)
