"""How a model is split over ranks, as data."""

from enum import Enum

from memplan.fast_dataclass import dataclass


class TensorParallelKind(Enum):
    """Whose split it is; the value is what people read."""

    DTENSOR = "DTensor"
    """torch's: inputs are kept as they were gathered."""
    AUTOTP = "AutoTP"
    """DeepSpeed's: collectives add up in place, and the token table is whole."""
    MEGATRON = "Megatron"
    """Megatron's: shares are kept, and gathered into one buffer again; the loss is always split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """Heads, networks and vocabulary split over the ranks of a group.

    >>> TensorParallel(degree=4, sequence=True).words
    'tensor parallel over 4 ranks (DTensor) with sequence parallel'
    """

    degree: int
    """Ranks over which each split weight is spread."""
    sequence: bool = False
    """Between the split blocks each rank has a share of every sequence (``SequenceParallel``)."""
    loss: bool = False
    """The logits stay split over the vocabulary (``loss_parallel``)."""
    kind: TensorParallelKind = TensorParallelKind.DTENSOR
    """Whose it is."""
    splits_adapters: bool = False
    """Both factors of an adapter are split beside their layer, as NeMo AutoModel does it; else as peft does,
    the second one of layers of columns alone."""

    leaves_mixers: bool = False
    """What stands in attention's place in some layers every rank has whole, as NeMo AutoModel leaves it; else as
    transformers' plan has it."""

    @property
    def words(self) -> str:
        """What people read of it."""
        beside = [
            name
            for name, chosen in (("sequence parallel", self.sequence), ("loss parallel", self.loss))
            if chosen
        ]
        return f"tensor parallel over {self.degree} ranks ({self.kind.value})" + (
            f" with {' and '.join(beside)}" if beside else ""
        )


class PipelineSchedule(Enum):
    """The order in which pipeline stages run their micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_ONE_F_ONE_B = "interleaved-1f1b"
    LOOPED_BFS = "looped-bfs"
    INTERLEAVED_ZERO_BUBBLE = "interleaved-zero-bubble"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"

    @property
    def is_single(self) -> bool:
        """Each rank has one stage."""
        return self in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)

    @property
    def is_v(self) -> bool:
        """Each rank has two stages, as far from either end of the model."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPEV)

    @property
    def splits_backward(self) -> bool:
        """Gradients of inputs and of weights come in passes of their own, of some micro-batches at least."""
        return self.is_v or self is PipelineSchedule.INTERLEAVED_ZERO_BUBBLE

    @property
    def usual_virtual_stages(self) -> int:
        """Stages of a rank where nothing is said: torchtitan's."""
        return 1 if self.is_single else 2


class PipelineRuntime(Enum):
    """Whose code runs the schedule: what it holds beside the passes themselves."""

    TORCH = "torch"
    """``torch.distributed.pipelining`` (torchtitan): what is received lies in buffers of its own, one for
    each micro-batch, for the whole run; what a stage returns stays until its backward pass is over."""
    MEGATRON = "megatron"
    """Megatron-core's schedules: a buffer when something is received; what was sent is let go."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed's ``PipelineEngine``: one buffer for what is received, copies of it in slots that are used
    in turn."""

    @property
    def reads_buffers(self) -> bool:
        """A stage reads what it receives where it lies, in a buffer that stays and is none of the passes'."""
        return self is PipelineRuntime.TORCH

    @property
    def copies_inputs(self) -> bool:
        """What is received is copied out of its buffer, and a copy of that is what the layers read."""
        return self is PipelineRuntime.DEEPSPEED

    @property
    def declares_copies_first(self) -> bool:
        """Tied weights stand before a stage's others (``PipelineModule.tied_modules``)."""
        return self is PipelineRuntime.DEEPSPEED

    @property
    def keeps_gradients(self) -> bool:
        """The gradient that a backward pass begins with lies in a buffer that stays."""
        return self is not PipelineRuntime.MEGATRON

    @property
    def holds_logits(self) -> bool:
        """The last stage's outputs stay until its backward pass is over at least (torch's ``fwd_cache``,
        DeepSpeed's ``pipe_buffers``)."""
        return self is not PipelineRuntime.MEGATRON

    @property
    def lets_outputs_go(self) -> bool:
        """What a stage has sent is let go, only its graph is kept (``deallocate_pipeline_outputs``)."""
        return self is PipelineRuntime.MEGATRON


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlace:
    """Where a stage stands in the model, and who runs it: what its tape depends on beside its layers."""

    is_first: bool
    is_last: bool
    runtime: PipelineRuntime = PipelineRuntime.TORCH
    has_copy: bool = False
    """Its output matrix is a copy of the first stage's table."""
    splits_backward: bool = False
    """Gradients of its input and of its weights come in passes of their own, on some micro-batches at
    least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineParallel:
    """The layers spread over the ranks of a pipeline, in stages.

    >>> pipeline = PipelineParallel(
    ...     degree=4, schedule=PipelineSchedule.ONE_F_ONE_B, num_virtual=1, num_micro_batches=8
    ... )
    >>> pipeline.words
    'pipeline of 4 ranks (1f1b, 8 micro-batches)'
    """

    degree: int
    """Ranks over which the stages are spread."""
    schedule: PipelineSchedule
    num_virtual: int
    """Stages of each rank."""
    num_micro_batches: int
    """Of a step."""
    layers_per_stage: tuple[int, ...] | None = None
    """None: as ``divide_layers`` divides them."""
    runtime: PipelineRuntime = PipelineRuntime.TORCH
    returns_outputs: bool = False
    """``schedule.step(return_outputs=True)``, torch's default, which torchtitan switches off: the last
    stage keeps the logits of all micro-batches until the next step, and joins them at the end of each."""

    partition_method: str = ""
    """How DeepSpeed's ``PipelineModule`` divides the layers where ``layers_per_stage`` says nothing."""

    @property
    def num_batches(self) -> int:
        """Micro-batches whose ids and labels are on the GPU at a time.

        Megatron's loop fetches each in its turn; DeepSpeed's first stage has ids alone, in each slot.
        """
        if self.runtime is PipelineRuntime.MEGATRON:
            return 1
        if self.runtime is PipelineRuntime.DEEPSPEED:
            return max(1, (min(self.degree, self.num_micro_batches) + 1) // 2)
        return self.num_micro_batches

    @property
    def num_stages(self) -> int:
        """Of all ranks together."""
        return self.degree * self.num_virtual

    @property
    def words(self) -> str:
        """What people read of it."""
        found = [self.schedule.value]
        if self.num_virtual > 1:
            found.append(f"{self.num_virtual} stages a rank")
        count = self.num_micro_batches
        found.append(f"{count} micro-batch{'es' if count > 1 else ''}")
        return f"pipeline of {self.degree} ranks ({', '.join(found)})"
