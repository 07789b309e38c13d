"""A job's other models laid out: which there are, over which rows they run, and on top of what."""

from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.estimator.recording import (
    Walked,
    completion_length,
    tape_options,
    walked_on_card,
)
from memplan.fast_dataclass import replace
from memplan.graph.attention.masks import attentions
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.counts import total_parameters
from memplan.graph.losses.joint import check_objective
from memplan.graph.remembered import OF_TAPES
from memplan.hardware.gpu import GpuSpec
from memplan.memory.beside import ALONE, Beside, Share, SideModel, When, raised
from memplan.memory.engine_options import frozen_format
from memplan.memory.passes import Height
from memplan.memory.programs.others import shards_frozen_models
from memplan.memory.replaying.ledger import Part
from memplan.model.joining import Joining
from memplan.model.spec import ModelSpec, Task
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import Offload, Recomputation
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import LossKernel
from memplan.training.choices_of_kernels.losses import LOSS_FORMS
from memplan.training.compilation import Compilation
from memplan.training.evaluation import Evaluation
from memplan.training.freezing import FrozenParts
from memplan.training.jobs import (
    COLOCATED,
    PLAIN,
    FrozenUnits,
    Job,
    JobKind,
    Leaving,
    OtherModel,
    Rollout,
)
from memplan.training.objectives import Objective
from memplan.training.optimizers.script import Stepped, state_bytes
from memplan.training.optimizers.table import chosen
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import PipelineParallel, PipelineRuntime
from memplan.units import GIB, ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUND = Height()


def trained_model(model: ModelSpec, job: Job) -> ModelSpec:
    """The model that a job trains: with a scalar head for a reward model.

    Raises ``SetupError`` for a model without the head that the job needs.
    """
    if job.kind is JobKind.REWARD:
        return _with_scalar_head(model)
    if job.objective is not Objective.TASK:
        check_objective(model)
    return model


def _with_scalar_head(model: ModelSpec) -> ModelSpec:
    if len(model.stacks) != 1:
        msg = f"job: {model.name} is no decoder, which alone has a scalar head here"
        raise SetupError(msg)
    return replace(model, task=Task.SEQUENCE_CLASSIFICATION, num_labels=1)


@OF_TAPES.remembered(maxsize=64)
def beside(walked: Walked, resolved: TrainingSetup, gpu: GpuSpec | None) -> Beside:
    """All that a job has beside the model that is trained.

    Raises ``SetupError`` for a model whose name was not looked up, or that does not fit the job.
    """
    plan = _Plan(walked, resolved, gpu)
    ema = resolved.ema
    averaged = 0
    if ema is not None:
        averaged = (ema.dtype or PRECISIONS[resolved.chosen_precision].weights).num_bytes
    made = Beside(
        models=tuple(plan.models()),
        shares=tuple(plan.shares()),
        averaged_bytes=0 if ema is None or ema.on_cpu else averaged,
        averaged_host_bytes=averaged if ema is not None and ema.on_cpu else 0,
    )
    is_nothing = not made.models and not made.shares and ema is None
    return ALONE if is_nothing else made


def _without(options: object, name: str) -> dict[str, object]:
    """Engine options without one."""
    return {key: value for key, value in dict(options).items() if key != name}  # type: ignore[call-overload]


def left_bytes(tape: Tape, setup: TrainingSetup) -> int:
    """What of the trained model's weights and states leaves the GPU while completions are generated [bytes].

    Parts of each weight on its ranks, rounding left out; states as the optimizer keeps them of such a part.
    """
    leaves, formats = setup.job.leaves, PRECISIONS[setup.chosen_precision]
    if leaves is Leaving.NONE or setup.offload_param is Offload.CPU:
        return 0
    shards = setup.chosen_engine in (Engine.FSDP, Engine.FSDP1)
    replicas = dict(setup.engine_options).get("data_parallel_replicate_degree", 1)
    degree = setup.gradient_ranks // int(str(replicas)) if shards else 1
    frozen = frozen_format(setup)
    row, options = chosen(setup.optimizer, setup.optimizer_options)
    found = 0
    for segment in tape.segments:
        for parameter in segment.parameters:
            trained = parameter.requires_grad and not parameter.unused
            dtype = formats.weights if trained else frozen
            part = Stepped((ceil_div(parameter.numel, degree),), dtype)
            each = part.numel * dtype.num_bytes * leaves.parameters
            each += state_bytes(row, options, part) * (leaves.states and trained)
            found += each * segment.num_copies
    return found


def generation(
    walked: Walked, setup: TrainingSetup, gpu: GpuSpec | None, rows: int, served: DType | None
) -> "tuple[SideModel, SideModel]":
    """The passes that generate completions of so many sequences at once: of the prompts, and of a token.

    ``served``: what an engine of its own has the weights in; None: the trained model itself generates.
    """
    prompt, token = _Plan(walked, setup, gpu)._generation(When.ROLLOUT, rows, served)
    return prompt, token


def _sees_once(model: ModelSpec) -> bool:
    """Whether pictures and sound are read with the prompt alone: later tokens find them in keys and values
    (transformers' ``prepare_inputs_for_generation`` hands them over in the first pass); not where layers attend to them."""
    join = model.join
    return join is not None and join.joining is not Joining.CROSSED and len(model.stacks) == 1


class _Plan:
    """Which passes a step makes."""

    def __init__(self, walked: Walked, resolved: TrainingSetup, gpu: GpuSpec | None) -> None:
        self.walked = walked
        self.setup = resolved
        self.job = resolved.job
        self.gpu = gpu
        self.has_adapter = resolved.adapter is not None
        self.engine_shards = shards_frozen_models(
            resolved.chosen_engine, resolved.zero_stage, resolved.gradient_ranks
        )

    def models(self) -> "Iterator[SideModel]":
        """Every pass of another model, and of the trained one without gradients."""
        kind = self.job.kind
        if self.job.generates:
            yield from self._rollouts()
        elif kind is JobKind.KTO:
            yield from self._mismatched()
        yield from self._joined()
        yield from self._evaluation()

    def shares(self) -> "Iterator[Share]":
        """Shares of the card."""
        job, gpu = self.job, self.gpu
        if job.rollout_share and gpu is not None:
            engine, share = job.chosen_rollout.value, int(job.rollout_share * gpu.capacity_bytes)
            words = f"{engine}: {job.rollout_share:g} of the card"
            left = left_bytes(self.walked.tape, self.setup) if job.sleep else 0
            if left:
                words += f", {left / GIB:.1f} GiB of it where weights or states make room for it"
            if share > left:
                yield Share(
                    num_bytes=share - left,
                    words=words,
                    only_in=Part.GENERATION if job.sleep else None,
                )

    # -- what runs when --------------------------------------------------------------------------

    def _joined(self) -> "Iterator[SideModel]":
        """A reference or teacher on top of what the trained model keeps."""
        if self.job.generates:
            return
        if self.job.kind is JobKind.KTO:
            mismatched = self._scorer("reference", When.JOINED, Objective.PREFERENCE)
            yield from (replace(each, owns_weights=False) for each in mismatched)
        for role in ("reference", "teacher"):
            objective = Objective.LOGITS if role == "teacher" else Objective.PREFERENCE
            yield from self._scorer(role, When.JOINED, objective)

    def _mismatched(self) -> "Iterator[SideModel]":
        """KTO's other pairs of prompt and answer, for the KL term."""
        yield self._own(When.FIRST, Objective.PREFERENCE, role="mismatched answers")

    def _rollouts(self) -> "Iterator[SideModel]":
        """Completions, their log-probabilities under each model, and their scores."""
        job = self.job
        scored = Objective.POLICY_GRADIENT
        if job.chosen_rollout is Rollout.HF:
            yield from self._generation(When.ROLLOUT, job.rollout_batch_size)
        if job.kind is JobKind.PPO or job.chosen_rollout in (*COLOCATED, Rollout.SERVER):
            yield self._own(When.ROLLOUT, scored, role="earlier log-probabilities")
        yield from self._scorer("reference", When.ROLLOUT, scored)
        yield from self._scorer("reward", When.ROLLOUT, Objective.VALUES)
        yield from self._critic()

    def _critic(self) -> "Iterator[SideModel]":
        model = self._model_of("critic")
        if model is None:
            return
        setup = replace(
            self.setup, job=PLAIN, adapter=None, freeze=FrozenParts(), ema=None, evaluation=None,
            micro_batch_size=self.job.critic_batch_size or self.setup.micro_batch_size,
            checkpointing=self.job.critic_checkpointing or self.setup.checkpointing,
            engine_options=_without(self.setup.engine_options, "frozen_dtype"),
        )  # fmt: skip
        options = replace(tape_options(setup, self.gpu), objective=Objective.VALUES)
        found = walked_on_card(model, options)
        yield SideModel(
            role="critic", tape=found.tape, passes=found.passes, setup=setup, when=When.OWN_STEP,
            owns_weights=True, is_sharded=self.engine_shards,
        )  # fmt: skip

    def _evaluation(self) -> "Iterator[SideModel]":
        job, how = self.job, self.setup.evaluation
        if how is not None and job.kind is JobKind.PPO:
            yield from self._sampled(how)
        elif how is not None and self.setup.pipeline is not None:
            yield from self._staged(how, self.setup.pipeline)
        elif how is not None:
            side = self._side(
                self.walked.model, self._evaluation_options(how), role="evaluation",
                when=When.EVALUATION, owns=False,
            )  # fmt: skip
            yield replace(side, evaluation=how)
            yield from self._attending(how, side)
        if job.generate_batch_size is not None:
            yield from self._generation(When.EVALUATION, job.generate_batch_size)

    def _staged(self, how: Evaluation, pipeline: PipelineParallel) -> "Iterator[SideModel]":
        """A batch of it, each of whose micro-batches passes through every stage."""
        from memplan.estimator.pipelines import stages_of  # only for pipelines

        rows = min(how.batch_size, self.setup.micro_batch_size)
        if pipeline.runtime is PipelineRuntime.TORCH:
            # ``n_microbatches`` is the schedule's.
            rows = ceil_div(how.batch_size, pipeline.num_micro_batches)
        options = self._evaluation_options(replace(how, batch_size=rows))
        options = replace(options, outputs_held=pipeline.runtime.holds_logits)
        setup = replace(self.setup, evaluation=None)
        for stage in stages_of(self.walked.model, options, pipeline):
            yield SideModel(
                role="evaluation", tape=stage.tape, passes=stage.passes, setup=setup,
                when=When.EVALUATION, owns_weights=False, is_sharded=self.engine_shards,
                evaluation=how,
            )  # fmt: skip

    def _sampled(self, how: Evaluation) -> "Iterator[SideModel]":
        """PPO's evaluation: completions of a batch of prompts, and their rewards.

        (TRL 1.16, experimental/ppo/ppo_trainer.py, ``PPOTrainer.generate_completions``)
        """
        yield from self._generation(When.EVALUATION, how.batch_size)
        job = replace(self.job, scoring_batch_size=None)
        setup = replace(self._evaluated(how), job=job, evaluation=None)
        plan = _Plan(self.walked, setup, self.gpu)
        for each in plan._scorer("reward", When.EVALUATION, Objective.VALUES):
            yield replace(each, owns_weights=False)

    def _attending(self, how: Evaluation, side: SideModel) -> "Iterator[SideModel]":
        """What a step's passes are joined by, over a batch of evaluation; weights are there."""
        job = self.job
        if job.generates:
            job = replace(job, rollout_batch_size=how.batch_size, scoring_batch_size=None)
        setup = replace(self._evaluated(how), job=job, evaluation=None)
        trained = Walked(
            model=self.walked.model, options=side.tape.options, tape=side.tape, passes=side.passes
        )
        for each in _Plan(trained, setup, self.gpu).models():
            if each.when in (When.ROLLOUT, When.FIRST, When.JOINED):
                yield replace(each, owns_weights=False, of_evaluation=True)

    def _evaluated(self, how: Evaluation) -> TrainingSetup:
        """The setup with a batch of evaluation in place of a step's."""
        length = how.seq_len or self.setup.seq_len
        return replace(self.setup, micro_batch_size=how.batch_size, seq_len=length)

    def _evaluation_options(self, how: Evaluation) -> TapeOptions:
        """A batch of it, whose outputs are held until the loop has taken what it keeps.

        Liger's fused head makes no logits where the loss alone is asked for (transformers 5.23,
        ``Trainer.prediction_step``); where they are kept it is not used.
        """
        bare = self._evaluated(how)
        if how.num_kept and LOSS_FORMS[bare.chosen_kernels.loss].matrix is not None:
            bare = replace(bare, loss=LossKernel.EAGER)
        options = self._options_without_gradients(has_adapter=True, setup=bare)
        return replace(options, outputs_held=True, of_trained=True, evaluated=True)

    def _generation(
        self, when: When, batch: int | None, served: DType | None = None
    ) -> "Iterator[SideModel]":
        """transformers' ``generate``: the prompt at once, then token after token."""
        setup = self.setup
        rows = batch or setup.micro_batch_size * setup.gradient_accumulation_steps
        length = setup.seq_len or 1
        prompt = max(length - completion_length(setup), 1)
        model = self.walked.model
        check_objective(model)
        options = replace(
            self._options_without_gradients(has_adapter=True),
            batch_size=rows, objective=Objective.LAST_LOGITS, of_trained=True,
        )  # fmt: skip
        if served is not None:
            options = replace(options, weights=served, compute=served, autocast=None)
        dtype = options.autocast or options.compute
        gathered = 0
        if self.engine_shards and when is When.ROLLOUT:
            gathered = total_parameters(self.walked.tape) * options.compute.num_bytes
        later = replace(options, images_per_sample=0) if _sees_once(model) else options
        for role, tokens, cached, given in (
            ("generation, the prompt", prompt, prompt, options),
            ("generation, a token", 1, length, later),
        ):
            side = self._side(
                model, replace(given, seq_len=tokens, target_seq_len=tokens),
                role=role, when=when, owns=False,
            )  # fmt: skip
            words = f"keys and values of {rows} x {cached} tokens"
            yield replace(
                side, is_sharded=side.is_sharded and not gathered,
                kept_bytes=cache_bytes(model, rows, cached, dtype) + gathered,
                kept_words=f"{words}, and the model gathered to generate" if gathered else words,
            )  # fmt: skip

    # -- one pass --------------------------------------------------------------------------------

    def _model_of(self, role: str) -> ModelSpec | None:
        """The model of a role; None: there is none of its own."""
        given = self.job.other(role, has_adapter=self.has_adapter)
        if given is OtherModel.SAME:
            return self.walked.model
        if isinstance(given, ModelSpec):
            return given
        if isinstance(given, str):
            msg = f"job: {role}: {given!r} is a name: load the model, or use memplan.estimate"
            raise SetupError(msg)
        return None

    def _scorer(self, role: str, when: When, objective: Objective) -> "Iterator[SideModel]":
        """A frozen model over the same rows."""
        if self.job.other(role, has_adapter=self.has_adapter) is OtherModel.ADAPTER_OFF:
            if not self.has_adapter:
                msg = f"job: {role}: adapter-off needs an adapter, and the setup has none"
                raise SetupError(msg)
            yield self._own(when, objective, role="adapter off", has_adapter=False)
            return
        model = self._model_of(role)
        if model is None:
            return
        if objective is not Objective.VALUES:
            check_objective(model)
        options = replace(
            self._options_without_gradients(has_adapter=False), objective=objective,
            fp8=Fp8Recipe.NONE,
        )  # fmt: skip
        dtype = self.job.frozen_dtype
        if dtype is not None:
            options = replace(options, weights=dtype, compute=dtype)
        yield self._side(model, options, role=role, when=when, owns=True)

    def _own(
        self, when: When, objective: Objective, *, role: str, has_adapter: bool = True
    ) -> SideModel:
        """The trained model itself, without gradients; with its adapter off nothing of it is trained."""
        options = self._options_without_gradients(has_adapter=has_adapter)
        options = replace(options, objective=objective, of_trained=has_adapter)
        return self._side(self.walked.model, options, role=role, when=when, owns=False)

    def _options_without_gradients(
        self, *, has_adapter: bool, setup: TrainingSetup | None = None
    ) -> TapeOptions:
        setup = self._scoring_setup() if setup is None else setup
        adapter = setup.adapter if has_adapter else None
        bare = replace(
            setup, adapter=adapter, checkpointing=Recomputation.NONE,
            offload_activations=ActivationOffload.NONE, offload_activations_ratio=1.0,
        )  # fmt: skip
        options = tape_options(bare, self.gpu)
        if adapter is None and setup.adapter is not None:
            # Switched off it is under the same autocast as it is when it is on.
            options = replace(options, autocast=tape_options(setup, self.gpu).autocast)
        return replace(options, without_gradients=True, dropout=0.0, compile=Compilation.NONE)

    def _scoring_setup(self) -> TrainingSetup:
        """The setup with as many sequences as are scored at once."""
        rows = self.job.scoring_batch_size
        return self.setup if rows is None else replace(self.setup, micro_batch_size=rows)

    def _side(
        self, model: ModelSpec, options: TapeOptions, *, role: str, when: When, owns: bool
    ) -> SideModel:
        found = walked_on_card(model, options)
        base = self._base(when)
        setup = replace(self._scoring_setup(), job=PLAIN, ema=None, evaluation=None)
        if owns and self.job.frozen_offload:
            setup = replace(setup, offload_param=Offload.CPU, offload_optimizer=Offload.CPU)
        return SideModel(
            role=role, tape=found.tape, passes=raised(found.passes, base), setup=setup, when=when,
            owns_weights=owns, is_sharded=self.engine_shards,
            is_one_unit=owns and self.job.frozen_units is FrozenUnits.WHOLE,
        )  # fmt: skip

    def _base(self, when: When) -> Height:
        """What the trained model keeps meanwhile."""
        if when is not When.JOINED:
            return _GROUND
        joined_at = self.walked.tape.joined_at
        assert joined_at is not None, "a job with a joined pass has a loss of its own"
        passes = self.walked.passes.forward
        return next(each.start for each in passes if each.segment.index == joined_at)


def cache_bytes(model: ModelSpec, batch: int, tokens: int, dtype: DType) -> int:
    """Keys and values of all layers, and one layer's once more while it grows by a token [bytes].

    A layer with a window caches no more than that (transformers 5.23, ``cache_utils.py``).
    """
    each = []
    for stack in model.stacks:
        for run, spec in zip(stack.runs, attentions(stack), strict=False):
            length = tokens if spec.sliding_window is None else min(tokens, spec.sliding_window)
            width = spec.head_dim + (spec.value_head_dim or spec.head_dim)
            size = batch * length * spec.num_kv_heads * width * dtype.num_bytes
            each.append((size, run.count))
    return sum(size * count for size, count in each) + max((size for size, _ in each), default=0)
