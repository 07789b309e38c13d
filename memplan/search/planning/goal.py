"""What a plan is asked for, and what it answers: the goal, the ways to hold a model, what fits and what not."""

from enum import Enum
from typing import TYPE_CHECKING, Any

from memplan.errors import SetupError
from memplan.estimator import Estimate
from memplan.estimator.time.step_time import StepTime
from memplan.fast_dataclass import dataclass, field, replace
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.pool import USUAL_GPUS_PER_NODE, Pool
from memplan.search.planning.concessions import Concession
from memplan.search.planning.degrees import AskedDegrees
from memplan.search.planning.speed import ASSUMPTIONS, RelativeSpeed
from memplan.training.choices import Checkpointing, FsdpStrategy, Offload, ZeroStage
from memplan.training.coercion import coerce_enum
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup
from memplan.upward import Displayed, Drawn, provided

if TYPE_CHECKING:
    from collections.abc import Callable

    from memplan.estimator.time.run_cost import TimeQuestion

DEFAULT_LIMIT = 20
"""Setups that are returned, unless a goal says otherwise."""


class Objective(Enum):
    """What makes one setup better than another."""

    SPEED = "speed"
    """All GPUs together."""
    COST = "cost"
    """As little of GPUs' time for each token as possible."""
    GPUS = "gpus"
    """As few GPUs as possible."""
    BATCH = "batch"
    """As large a micro-batch, over all GPUs, as possible."""
    SEQ_LEN = "seq-len"
    """As long a sequence as possible, the micro-batch being the base's."""
    LAYERS = "layers"
    """As many layers in each stack as possible, the micro-batch being the base's."""


DEGREES = (
    "tensor_parallel", "pipeline_parallel", "virtual_stages", "context_parallel", "expert_parallel",
)  # fmt: skip
"""A goal's fields that are degrees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineVariant:
    """One way to hold a model: an engine, what it shards and what it offloads."""

    engine: Engine
    zero_stage: ZeroStage | None = None
    fsdp_strategy: FsdpStrategy | None = None
    offload_optimizer: Offload = Offload.NONE
    offload_param: Offload = Offload.NONE
    engine_options: tuple[tuple[str, object], ...] = ()
    """The engine's own settings without which nobody runs it so."""

    @property
    def offloads(self) -> bool:
        """Whether anything is kept on the host."""
        return Offload.CPU in (self.offload_optimizer, self.offload_param)

    def options(self, base: TrainingSetup) -> dict[str, object]:
        """The engine's own settings: its own and the base's, which go first."""
        return {**dict(self.engine_options), **dict(base.engine_options)}


VARIANTS: tuple[EngineVariant, ...] = (
    EngineVariant(engine=Engine.DDP),
    EngineVariant(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.OPTIMIZER),
    EngineVariant(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS),
    EngineVariant(engine=Engine.FSDP, fsdp_strategy=FsdpStrategy.SHARD_GRAD_OP),
    EngineVariant(engine=Engine.FSDP, fsdp_strategy=FsdpStrategy.FULL_SHARD),
    EngineVariant(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS),
    EngineVariant(
        engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, offload_optimizer=Offload.CPU
    ),
    EngineVariant(
        engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS, offload_optimizer=Offload.CPU
    ),
    EngineVariant(
        engine=Engine.FSDP, fsdp_strategy=FsdpStrategy.FULL_SHARD,
        offload_optimizer=Offload.CPU, offload_param=Offload.CPU,
    ),
    EngineVariant(
        engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS,
        offload_optimizer=Offload.CPU, offload_param=Offload.CPU,
    ),
)  # fmt: skip
"""What a plan tries, simplest first: the order decides among equals."""


ASKED_FOR: tuple[EngineVariant, ...] = (
    EngineVariant(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.NONE),
    *(replace(each, engine=Engine.FSDP1) for each in VARIANTS if each.engine is Engine.FSDP),
)
"""What is tried only where it is named: it holds what others here do, and more."""
MEGATRON = EngineVariant(
    engine=Engine.MEGATRON, engine_options=(("use_distributed_optimizer", True),)
)
"""With its distributed optimizer, as its own recipes are; for split models, or where it is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What a plan is for.

    Enums accept their string values, and a single value stands for a tuple of one. Raises ``SetupError`` for values that make no sense.
    """

    num_gpus: tuple[int, ...] = (8,)
    """Numbers of GPUs to consider."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step over all ranks; None: whatever one micro-batch gives."""
    headroom: float = 0.0
    """Share of the GPU's memory to keep free, beside what the range of the total allows for."""
    objective: Objective = Objective.SPEED
    base: TrainingSetup = TrainingSetup()
    """Sequence length, optimizer, kernels, degrees: what the plan does not choose."""
    engines: tuple[Engine, ...] = ()
    """Engines to consider; empty: ddp, deepspeed and fsdp."""
    zero_stages: tuple[ZeroStage, ...] = ()
    """DeepSpeed's stages to consider, which alone then is; empty: 1 to 3."""
    precisions: tuple[Precision, ...] = ()
    """Precisions to consider; empty: each engine's usual one, then bf16 without fp32 states."""
    checkpointing: tuple[Checkpointing, ...] = ()
    """Policies to consider; empty: none and full, with kernels that have it also selective."""
    tensor_parallel: tuple[int, ...] = ()
    """Degrees to consider, those above 1 with sequence and loss parallel; empty: the base's own, or
    what is usual where that is faster or nothing else fits. So the other degrees."""
    pipeline_parallel: tuple[int, ...] = ()
    virtual_stages: tuple[int, ...] = ()
    context_parallel: tuple[int, ...] = ()
    expert_parallel: tuple[int, ...] = ()
    allow: tuple[Concession, ...] = ()
    """What may be given up beside precision, so that the model fits; empty: nothing."""
    limit: int = DEFAULT_LIMIT
    """Setups to return."""
    gpus_per_node: int = USUAL_GPUS_PER_NODE
    """Of the machines that there are."""
    node_memory_bytes: int | None = None
    """CPU RAM of one node; None: what a usual node of the card has for the job's GPUs, where that is known [bytes]."""

    def __post_init__(self) -> None:
        if isinstance(self.num_gpus, int):
            object.__setattr__(self, "num_gpus", (self.num_gpus,))
        for name, kind in (
            ("engines", Engine),
            ("precisions", Precision),
            ("zero_stages", ZeroStage),
            ("allow", Concession),
        ):
            object.__setattr__(self, name, _members(name, getattr(self, name), kind))
        object.__setattr__(self, "checkpointing", _policies(self.checkpointing))
        for name in DEGREES:
            degrees = getattr(self, name)
            if isinstance(degrees, int):
                object.__setattr__(self, name, (degrees,))
            elif degrees and min(degrees) < 1:
                msg = f"{name}: degrees are whole numbers, each at least 1"
                raise SetupError(msg)
        if not self.num_gpus or min(self.num_gpus) < 1:
            msg = "num_gpus: name at least one number of GPUs, each at least 1"
            raise SetupError(msg)
        if not 0 <= self.headroom < 1:
            msg = f"headroom: must be from 0 to below 1 (5 % is 0.05), got {self.headroom}"
            raise SetupError(msg)
        if self.gpus_per_node < 1:
            msg = f"gpus_per_node: must be at least 1, got {self.gpus_per_node}"
            raise SetupError(msg)
        if self.global_batch_size is not None and self.global_batch_size < 1:
            msg = f"global_batch_size: must be at least 1, got {self.global_batch_size}"
            raise SetupError(msg)
        object.__setattr__(self, "num_gpus", tuple(sorted(set(self.num_gpus))))
        object.__setattr__(self, "objective", coerce_enum("objective", self.objective, Objective))
        if self.zero_stages:
            self._check_stages()

    def _check_stages(self) -> None:
        if self.engines and Engine.DEEPSPEED not in self.engines:
            named = ", ".join(each.value for each in self.engines)
            msg = f"zero_stages: only deepspeed has ZeRO stages, and the engines are {named}"
            raise SetupError(msg)

    def num_nodes(self, num_gpus: int) -> int:
        """Machines that so many GPUs are on."""
        return -(-num_gpus // self.gpus_per_node)

    @property
    def concessions(self) -> tuple[Concession, ...]:
        """What is given up, the least first: nothing, then what is allowed."""
        allowed = {Concession.NONE, *self.allow}
        return tuple(each for each in Concession if each in allowed)

    @property
    def degrees(self) -> AskedDegrees:
        """The degrees that are named."""
        return AskedDegrees(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            virtual=self.virtual_stages,
            context=self.context_parallel,
            expert=self.expert_parallel,
        )

    @property
    def variants(self) -> tuple["EngineVariant", ...]:
        """The ways to hold a model that are tried, simplest first."""
        stages = self.zero_stages
        usual = (Engine.DEEPSPEED,) if stages else (Engine.DDP, Engine.DEEPSPEED, Engine.FSDP)
        engines = self.engines or usual
        return tuple(
            each
            for each in (*ASKED_FOR, *VARIANTS, MEGATRON)
            if each.engine in engines
            and (
                each.zero_stage in stages
                if stages and each.zero_stage is not None
                else each.zero_stage is not ZeroStage.NONE
            )
        )

    @property
    def split_variants(self) -> tuple["EngineVariant", ...]:
        """The same for models that are split: Megatron's engine too, which is made for it."""
        is_open = not (self.engines or self.zero_stages or self.base.engine_options)
        return (*self.variants, MEGATRON) if is_open else self.variants


def _members(name: str, values: object, kind: type[Enum]) -> tuple[Enum, ...]:
    """Members of an enum, which may be given by their values, or one alone."""
    given = values if isinstance(values, tuple | list) else (values,)
    return tuple(coerce_enum(name, each, kind) for each in given)


def _policies(values: object) -> tuple[Checkpointing, ...]:
    given = values if isinstance(values, tuple | list) else (values,)
    return tuple(TrainingSetup(checkpointing=each).checkpointing for each in given)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSetup:
    """One setup that fits, with the largest micro-batch that does."""

    estimate: Estimate
    speed: RelativeSpeed
    given_up: Concession
    tier: int
    """0 with fp32 optimizer states; 1 without."""
    simplicity: int
    """Its place among the ways to train; smaller is simpler."""
    flushes: bool = False
    """The allocator gives its cache back in every step, with any micro-batch: it fits, and waits for that each time."""
    time: StepTime | None = None
    """Of its step, where a plan asks for it and it is known."""

    @property
    def setup(self) -> TrainingSetup:
        """The setup, with every default filled in."""
        return self.estimate.setup

    @property
    def offloads(self) -> bool:
        """Whether optimizer states or weights are kept on the host."""
        return Offload.CPU in (self.setup.offload_optimizer, self.setup.offload_param)

    @property
    def headroom_bytes(self) -> int:
        """What is left of the GPU at the high end of the range [bytes]."""
        gpu = self.estimate.gpu
        capacity = gpu.capacity_bytes if gpu is not None else 0
        return capacity - self.estimate.total_bytes.high

    @property
    def total_speed(self) -> float:
        """Of all GPUs together, in full-speed GPUs."""
        return self.speed.per_gpu * self.setup.num_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """A setup that does not fit even with the smallest micro-batch."""

    setup: TrainingSetup
    """With every default filled in."""
    limit_bytes: int
    """What may be used of the card."""
    given_up: Concession
    tier: int
    """Of its precision: 0 where optimizer states are in fp32."""
    find_estimate: "Callable[[], Estimate]" = field(repr=False, compare=False)
    find_better: "Callable[[], Estimate | None]" = field(repr=False, compare=False)

    @property
    def estimate(self) -> Estimate:
        """What it needs; made when it is asked for, where states alone are too many."""
        return self.find_estimate()

    @property
    def better(self) -> Estimate | None:
        """The nearest setup of the plan that fits; looked for when it is asked for."""
        return self.find_better()

    @property
    def missing_bytes(self) -> int:
        """How much the high end of the range exceeds what may be used [bytes]."""
        return max(0, self.estimate.total_bytes.high - self.limit_bytes)

    @property
    def saved_bytes(self) -> int:
        """What that one saves, at the high end [bytes]."""
        if self.better is None:
            return 0
        return self.estimate.total_bytes.high - self.better.total_bytes.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Displayed):
    """The answer to a goal."""

    goal: Goal
    gpu: GpuSpec
    setups: tuple[PlannedSetup, ...]
    """What fits, best first."""
    num_fitting: int
    """All that have room for what they allocate, those beyond the goal's limit included; of those that are told a
    replay says that they fit."""
    shortfalls: tuple[Shortfall, ...]
    """What does not, in the order it was tried."""
    overfilling: tuple[Estimate, ...] = ()
    """What a node's CPU RAM is not enough for, with the smallest size."""
    refused: tuple[str, ...]
    """Why combinations were not tried at all, each reason once."""
    num_ruled_out: int = 0
    """Combinations that hold more than there is by bounds alone, and of which no estimate was made."""
    front: tuple[PlannedSetup, ...] = ()
    """Of all that fit, where times are asked for: those that no other beats in memory and time."""
    times: "TimeQuestion | None" = None
    """What is told of times in rows; None: nothing."""
    pool: Pool | None = None
    """The platform's pool that it is for; None: whoever has such cards."""
    assumptions: tuple[str, ...] = ASSUMPTIONS
    """What the model's shape and the relative speeds rest on."""
    is_interrupted: bool = False
    """It was ended before all was tried: what is here is what was found by then."""

    @property
    def some(self) -> Estimate:
        """Any estimate: of what fits, or of what does not."""
        if self.setups:
            return self.setups[0].estimate
        return self.shortfalls[0].estimate if self.shortfalls else self.overfilling[0]

    def rows(self) -> list[dict[str, object]]:
        """The setups that fit as flat rows, best first, as ``memplan plan --format json`` has them."""
        found: list[dict[str, object]] = provided("plan_rows", self)
        return found

    def to_dict(self) -> dict[str, object]:
        """The document that ``memplan plan --format json`` writes."""
        found: dict[str, object] = provided("plan_document", self)
        return found

    def plot(self) -> Drawn:
        """Memory against time: every setup whose time is known, and those that none beats in both."""
        found: Drawn = provided("plan_picture", self)
        return found

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``. Raises ``UsageError`` where pandas is not installed."""
        return provided("data_frame", self)

    def __repr__(self) -> str:
        some = self.some
        best = f", the best {some!r}" if self.setups else ""
        return (
            f"Plan({some.model.name} on {self.gpu.short_name}: {self.num_fitting} setups fit{best})"
        )
