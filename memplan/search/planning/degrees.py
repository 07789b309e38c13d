"""Over how many GPUs a model may be split, and in which ways: the degrees that a plan looks at.

What practitioners keep to: layers are split inside a node (Narayanan et al., arXiv:2104.04473, section
3.2, takeaway 1), sequences from 8k tokens on (Megatron Core's parallelism guide). What a model itself
cannot be split by, its heads or its layers, is refused where it is estimated.
"""

from collections.abc import Iterator
from typing import NamedTuple

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.search.planning.sizes import ModelSizes
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.kernels import LossKernel
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import PipelineSchedule

LEAST_CONTEXT_TOKENS = 4096
"""Tokens that a rank keeps of a sequence at least: split are those of 8k and more."""
MOST_STAGES = 64
"""Ranks of a pipeline beyond which nobody goes."""
VIRTUAL_STAGES = (1, 2, 4)
"""Stages of one rank that are looked at."""
MICRO_BATCHES_OF_A_STAGE = 4
"""Micro-batches for each stage where no global batch says how many: from there on a pipeline's bubble
is small (Huang et al., arXiv:1811.06965, section 2.3)."""


class Degrees(NamedTuple):
    """A setup's fields ``tensor_parallel``, ``pipeline_parallel`` and so on."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """How much is split in all: fewer is simpler."""
        return self.tensor * self.pipeline * self.virtual * self.context * self.expert

    def on(self, base: TrainingSetup, engine: Engine) -> dict[str, object]:
        """The fields of a setup that they make under an engine, where the base has others.

        DeepSpeed's AutoTP splits neither sequences nor the loss; Megatron's loss is split by itself.
        """
        fields: dict[str, object] = {
            "tensor_parallel": self.tensor,
            "pipeline_parallel": self.pipeline,
            "virtual_stages": self.virtual,
            "context_parallel": self.context,
            "expert_parallel": self.expert,
        }
        if self.tensor != base.tensor_parallel:
            dtensor = engine not in (Engine.DEEPSPEED, Engine.MEGATRON)
            parallel_loss = base.chosen_kernels.loss is LossKernel.EAGER and dtensor
            fields["sequence_parallel"] = self.tensor > 1 and engine is not Engine.DEEPSPEED
            fields["loss_parallel"] = self.tensor > 1 and parallel_loss
        if self.pipeline == 1:
            fields["pipeline_schedule"] = None
        elif base.pipeline_schedule is None or self.virtual != base.virtual_stages:
            looped = PipelineSchedule.INTERLEAVED_ONE_F_ONE_B
            fields["pipeline_schedule"] = (
                looped if self.virtual > 1 else PipelineSchedule.ONE_F_ONE_B
            )
        return fields


def degrees_of(setup: TrainingSetup) -> Degrees:
    """Those of a setup."""
    return Degrees(
        setup.tensor_parallel, setup.pipeline_parallel, setup.virtual_stages,
        setup.context_parallel, setup.expert_parallel,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedDegrees:
    """The degrees of each kind that a plan is asked to look at; empty: what is usual."""

    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    virtual: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()

    @property
    def any(self) -> bool:
        """Whether any kind is named."""
        return bool(self.tensor or self.pipeline or self.virtual or self.context or self.expert)

    def fixed_on(self, base: TrainingSetup) -> "AskedDegrees":
        """Kinds that are not named are the base's own."""
        given = degrees_of(base)
        return AskedDegrees(
            tensor=self.tensor or (given.tensor,),
            pipeline=self.pipeline or (given.pipeline,),
            virtual=self.virtual or (given.virtual,),
            context=self.context or (given.context,),
            expert=self.expert or (given.expert,),
        )


def every_degree(
    asked: AskedDegrees, base: TrainingSetup, num_gpus: int, sizes: ModelSizes
) -> Iterator[Degrees]:
    """The degrees of so many GPUs, simplest first; kinds that the base sets are as it has them."""
    node = min(num_gpus, _gpus_per_node(base, num_gpus))
    given = degrees_of(base)
    seq_len = base.seq_len or 1
    tensors = asked.tensor or _own(given.tensor) or _doublings(node)
    contexts = (
        asked.context or _own(given.context) or _doublings(max(1, seq_len // LEAST_CONTEXT_TOKENS))
    )
    pipelines = asked.pipeline or _own(given.pipeline) or _stages(num_gpus, sizes)
    virtuals = asked.virtual or _own(given.virtual) or VIRTUAL_STAGES
    experts = asked.expert or _own(given.expert) or _doublings(max(1, sizes.num_experts))
    found = [
        Degrees(tensor, pipeline, virtual, context, expert)
        for tensor in tensors
        for context in contexts
        for pipeline in pipelines
        if num_gpus % (tensor * context * pipeline) == 0
        for virtual in virtuals
        if virtual == 1 or (pipeline > 1 and sizes.num_layers % (pipeline * virtual) == 0)
        for expert in experts
        if expert == 1 or (num_gpus // pipeline % expert == 0 and sizes.num_experts % expert == 0)
    ]
    return iter(sorted(found, key=lambda each: (each.size, each)))


def check_degrees(
    asked: AskedDegrees, num_gpus: tuple[int, ...], sizes: ModelSizes, name: str
) -> None:
    """Refuse degrees of which none can be, with the arithmetic.

    Raises ``SetupError``.
    """
    if asked.pipeline and min(asked.pipeline) > sizes.num_layers:
        msg = (
            f"pipeline_parallel: {min(asked.pipeline)} stages are more than the {sizes.num_layers} layers "
            f"of {name}: give at most {sizes.num_layers}"
        )
        raise SetupError(msg)
    stages = [
        (pipeline, virtual)
        for virtual in asked.virtual
        for pipeline in asked.pipeline or range(2, sizes.num_layers + 1)
        if virtual == 1 or sizes.num_layers % (pipeline * virtual) == 0
    ]
    if asked.virtual and not stages:
        msg = (
            f"virtual_stages: {min(asked.virtual)} stages on each rank of a pipeline do not divide the "
            f"{sizes.num_layers} layers of {name}"
        )
        raise SetupError(msg)
    if asked.expert and min(asked.expert) > 1 and not sizes.num_experts:
        msg = f"expert_parallel: {name} has no experts to spread over GPUs: leave it out"
        raise SetupError(msg)
    least = [min(each or (1,)) for each in (asked.tensor, asked.pipeline, asked.context)]
    product = least[0] * least[1] * least[2]
    if product > 1 and all(count % product for count in num_gpus):
        counts = ", ".join(map(str, num_gpus))
        msg = (
            f"num_gpus: {counts}: not divisible by tensor_parallel x pipeline_parallel x context_parallel "
            f"= {least[0]} x {least[1]} x {least[2]} = {product}"
        )
        raise SetupError(msg)


def may_split(
    engine: Engine, degrees: Degrees, num_gpus: int, *, zero_stage: ZeroStage | None = None
) -> bool:
    """Whether an engine may split models so: a plain loop only where the group is the whole job.

    DeepSpeed's pipelines go with stages 0 and 1 of ZeRO, and with no other degree; a ``zero_stage`` is
    named where pipelines are asked for, as they take a model that is written as a ``PipelineModule``.

    >>> may_split(Engine.DDP, Degrees(tensor=8), 8), may_split(Engine.DDP, Degrees(tensor=4), 8)
    (True, False)
    """
    if degrees == Degrees():
        return True
    if engine is Engine.DDP:
        return degrees.tensor * degrees.pipeline == num_gpus
    if engine is Engine.DEEPSPEED:
        if degrees.pipeline == 1:
            return True
        is_alone = degrees == Degrees(pipeline=degrees.pipeline)
        return is_alone and zero_stage in (ZeroStage.NONE, ZeroStage.OPTIMIZER)
    return engine in (Engine.FSDP, Engine.MEGATRON)


def _own(degree: int) -> tuple[int, ...]:
    return (degree,) if degree > 1 else ()


def _doublings(most: int) -> tuple[int, ...]:
    return tuple(1 << step for step in range(most.bit_length()))


def _stages(num_gpus: int, sizes: ModelSizes) -> tuple[int, ...]:
    """Powers of two, and what divides the layers; a model without a stack of layers is one stage."""
    most = max(1, min(num_gpus, sizes.num_layers, MOST_STAGES))
    return tuple(
        count
        for count in range(1, most + 1)
        if num_gpus % count == 0 and (count.bit_count() == 1 or sizes.num_layers % count == 0)
    )


def _gpus_per_node(base: TrainingSetup, num_gpus: int) -> int:
    from dataclasses import replace

    plain = replace(
        base, num_gpus=num_gpus, num_nodes=None, engine=None, zero_stage=None, fsdp_strategy=None,
        tensor_parallel=1, sequence_parallel=False, loss_parallel=False, pipeline_parallel=1,
        virtual_stages=1, pipeline_schedule=None, context_parallel=1, expert_parallel=1,
        precision=None, engine_options=(), optimizer="adamw-fused",  # type: ignore[arg-type]
    )  # fmt: skip
    return plain.gpus_per_node
