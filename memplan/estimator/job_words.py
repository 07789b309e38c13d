"""What a job was taken to be, in words."""

from memplan.estimator.recording import completion_length
from memplan.memory.programs.others import shards_frozen_models
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import LossKernel
from memplan.training.evaluation import Evaluation
from memplan.training.jobs import (
    COLOCATED,
    PAIRED,
    PLAIN,
    ROLES,
    FrozenUnits,
    JobKind,
    OtherModel,
    Rollout,
)
from memplan.training.objectives import LogProbabilities, Objective
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup


def job_words(resolved: TrainingSetup) -> tuple[str, ...]:
    """The job, its other models and who generates; nothing of a plain one."""
    found: list[str] = []
    if resolved.job != PLAIN and not resolved.job.is_plain:
        found += _of_job(resolved)
    ema = resolved.ema
    if ema is not None:
        dtype = ema.dtype or PRECISIONS[resolved.chosen_precision].weights
        place = "CPU RAM" if ema.on_cpu else "the GPU"
        found.append(f"an average of what a rank keeps of the weights, {dtype.label}, in {place}")
    if resolved.evaluation is not None:
        found.append(_evaluation_words(resolved.evaluation))
    if resolved.lengths is not None:
        found.append(f"lengths {resolved.lengths}: the longest batch's figures")
    return tuple(found)


def _evaluation_words(evaluation: Evaluation) -> str:
    """``evaluation between steps in batches of 8, logits of 4 kept``"""
    kept = evaluation.num_kept
    logits = f"logits of {kept} kept" if kept else "loss alone"
    length = f" of {evaluation.seq_len:,} tokens" if evaluation.seq_len else ""
    return f"evaluation between steps in batches of {evaluation.batch_size}{length}, {logits}"


def _of_job(resolved: TrainingSetup) -> list[str]:
    job = resolved.job
    found = [f"job {job.kind.value}"]
    if job.kind in PAIRED:
        rows = resolved.micro_batch_size * job.sequences_per_example
        found[0] += f": chosen and rejected in one batch, {rows} sequences"
    for role in ROLES:
        text = _role_words(resolved, role)
        if text:
            found.append(text)
    if job.objective in (Objective.PREFERENCE, Objective.POLICY_GRADIENT):
        loss = resolved.chosen_kernels.loss
        fused = LogProbabilities.FUSED is job.log_probabilities or loss is LossKernel.TRL
        if loss not in (LossKernel.EAGER, LossKernel.TRL):
            found.append(f"no loss kernel {loss.value}: the job has a loss of its own")
        way = LogProbabilities.FUSED if fused else job.log_probabilities
        found.append(f"log-probabilities {_LOG_PROBABILITIES[way]}")
    if job.switches_dropout_off and resolved.dropout is None:
        found.append("dropout 0, as TRL switches it off")
    if job.generates:
        found.append(_rollout_words(resolved))
    if job.generate_batch_size is not None:
        found.append(f"generation in evaluation, {job.generate_batch_size} at once")
    return found


def _role_words(resolved: TrainingSetup, role: str) -> str:
    """``reference: same as the policy, bf16, replicated``"""
    job = resolved.job
    other = job.other(role, has_adapter=resolved.adapter is not None)
    if other is OtherModel.NONE:
        is_grpos = job.kind is JobKind.GRPO and role == "reference"
        return f"no {role} model" if getattr(job, role) is not None or is_grpos else ""
    if other is OtherModel.PRECOMPUTED:
        return f"{role}: log-probabilities computed beforehand"
    if other is OtherModel.ADAPTER_OFF:
        return f"{role}: the model with its adapter switched off, no second copy"
    name = other.name if isinstance(other, ModelSpec) else "same as the trained model"
    dtype = job.frozen_dtype or PRECISIONS[resolved.chosen_precision].weights
    is_sharded = shards_frozen_models(
        resolved.chosen_engine, resolved.zero_stage, resolved.gradient_ranks
    )
    is_whole = resolved.chosen_engine is Engine.FSDP and job.frozen_units is FrozenUnits.WHOLE
    sharded = "sharded, gathered whole while it runs (TRL)" if is_whole else "sharded"
    spread = sharded if is_sharded else "replicated" if resolved.data_parallel > 1 else ""
    if role == "critic":
        words = [name, "trained by itself", "sharded" if is_sharded else spread]
    else:
        words = [name, "frozen", dtype.label, spread]
    return f"{role} model: {', '.join(filter(None, words))}"


def _rollout_words(resolved: TrainingSetup) -> str:
    job = resolved.job
    length = completion_length(resolved)
    text = f"completions of {length} tokens"
    rollout = job.chosen_rollout
    if rollout in COLOCATED:
        sleep = "" if not job.sleep else f", asleep in training (level {job.sleep})"
        return f"{text} by {rollout.value} with {job.rollout_share:g} of each card{sleep}"
    if rollout is Rollout.HF:
        return f"{text} by transformers' generate, with a cache of keys and values"
    if rollout is Rollout.SERVER:
        return f"{text} by a server on other cards"
    return f"{text}, there beforehand"


_LOG_PROBABILITIES = {
    LogProbabilities.ROWWISE: "out of all logits, sequence by sequence (TRL)",
    LogProbabilities.IN_PLACE: "out of all logits at once, in place (flash-attn, verl)",
    LogProbabilities.WHOLE: "out of fp32 copies of all logits at once (torchtune)",
    LogProbabilities.FUSED: "tile by tile (TRL 1.16)",
}
