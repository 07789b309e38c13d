"""What a plan tries on so many GPUs: engine, stage and offload x precision x degrees x checkpointing."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.pool import USUAL_GPUS_PER_NODE
from memplan.model.spec import ModelSpec
from memplan.search.planning.concessions import Concession, conceded
from memplan.search.planning.degrees import MICRO_BATCHES_OF_A_STAGE, Degrees, degrees_of, may_split
from memplan.search.planning.goal import EngineVariant, Goal
from memplan.training.choices import Checkpointing, Recomputation
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import PRECISIONS, Engine, Precision, engine_precision, engines_with
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.stages import divide_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One combination of the space, its micro-batch still open."""

    setup: TrainingSetup
    variant: EngineVariant
    given_up: Concession
    simplicity: int
    """Its variant's place among the ways to train; smaller is simpler."""
    tier: int
    """0 with fp32 optimizer states; 1 without."""

    @property
    def way(self) -> tuple[object, ...]:
        """All but checkpointing: what is hopeless with the most of that is hopeless."""
        setup = self.setup
        return (self.variant, self.given_up, setup.precision, degrees_of(setup))

    @property
    def without_offload(self) -> tuple[object, ...]:
        """What two share that differ only in what they offload, or in checkpointing."""
        variant, setup = self.variant, self.setup
        return (
            variant.engine, variant.zero_stage, self.given_up, setup.precision, degrees_of(setup),
        )  # fmt: skip


class _Where(NamedTuple):
    """On how many GPUs and machines; None: as many as a setup takes."""

    num_gpus: int
    num_nodes: int | None


class Loss(NamedTuple):
    """What candidates have in common that train equally well."""

    given_up: Concession
    tier: int


def losses(goal: Goal) -> list[Loss]:
    """What a goal allows to be lost, the least first."""
    return [Loss(given_up, tier) for given_up in goal.concessions for tier in (0, 1)]


class Space:
    """The combinations of one goal on one kind of GPU, and why some are none."""

    def __init__(self, goal: Goal, gpu: GpuSpec, model: ModelSpec) -> None:
        self.goal = goal
        self.gpu = gpu
        self.num_layers = model.num_layers
        self.context_length = model.context_length
        self.recomputes = model.recomputes
        self.refused: dict[str, None] = {}
        """Why combinations cannot be, each reason once."""

    def candidates(
        self, num_gpus: int, degrees: Iterable[Degrees], loss: Loss, *, is_full: bool = False
    ) -> Iterator[Candidate]:
        """Each of them that loses so much; of one way to train, those that save most come first.

        ``is_full``: with the defaults filled in that all have in common, which saves filling in each one's.
        """
        splits = list(degrees)
        is_split = any(each != Degrees() for each in splits)
        variants = self.goal.split_variants if is_split else self.goal.variants
        try:
            base = conceded(self.goal.base, loss.given_up)
        except SetupError as error:
            self.refused[str(error)] = None
            return
        where = _Where(num_gpus, self._nodes(num_gpus))
        if is_full:
            full = base.resolve(self.context_length)
            base = replace(base, seq_len=full.seq_len, target_seq_len=full.target_seq_len)
            where = _Where(num_gpus, self.goal.num_nodes(num_gpus))
        yield from self._of(base, loss, where, splits, variants)

    def _of(
        self,
        base: TrainingSetup,
        loss: Loss,
        where: "_Where",
        splits: list[Degrees],
        variants: tuple[EngineVariant, ...],
    ) -> Iterator[Candidate]:
        num_gpus = where.num_gpus
        engines = tuple({each.engine for each in variants})
        whole: set[tuple[object, ...]] = set()
        for simplicity, variant in enumerate(variants):
            if not _is_sensible(variant, num_gpus, engines):
                continue
            for tier, precision in self._precisions(base, variant.engine):
                if tier != loss.tier:
                    continue
                for split in splits:
                    zero_stage = variant.zero_stage if self.goal.pipeline_parallel else None
                    if not may_split(variant.engine, split, num_gpus, zero_stage=zero_stage):
                        continue
                    for policy in self._policies():
                        setup = self._setup(base, where, variant, precision, split, policy)
                        if setup is None:
                            continue
                        if setup.gradient_ranks == 1 < num_gpus and not variant.offloads:
                            # Nothing is shared out between copies of the model: ways to do that are one.
                            own = (variant.engine is Engine.MEGATRON, precision, split, policy)
                            if own in whole:
                                continue
                            whole.add(own)
                        yield Candidate(
                            setup=setup, variant=variant, given_up=loss.given_up,
                            simplicity=simplicity, tier=tier,
                        )  # fmt: skip

    def _nodes(self, num_gpus: int) -> int | None:
        """Machines where they are not as a setup takes them."""
        goal = self.goal
        return None if goal.gpus_per_node == USUAL_GPUS_PER_NODE else goal.num_nodes(num_gpus)

    def _setup(
        self,
        base: TrainingSetup,
        where: "_Where",
        variant: EngineVariant,
        precision: Precision,
        split: Degrees,
        policy: Checkpointing,
    ) -> TrainingSetup | None:
        """One combination; None where it contradicts itself."""
        steps = base.gradient_accumulation_steps
        if split.pipeline > 1 and steps == 1:
            steps = MICRO_BATCHES_OF_A_STAGE * split.pipeline
        fields: dict[str, object] = {
            **where._asdict(),
            "engine": variant.engine,
            "zero_stage": variant.zero_stage,
            "fsdp_strategy": variant.fsdp_strategy,
            "offload_optimizer": variant.offload_optimizer,
            "offload_param": variant.offload_param,
            "precision": precision,
            "checkpointing": policy,
            "gradient_accumulation_steps": steps,
            "engine_options": variant.options(base),
            **split.on(base, variant.engine),
        }
        try:
            if variant.engine is Engine.MEGATRON and base.layers_per_stage is None:
                fields["layers_per_stage"] = self._uneven(split)
            return replace(base, **fields)  # type: ignore[arg-type]
        except SetupError as error:
            self.refused[str(error)] = None
            return None

    def _uneven(self, split: Degrees) -> tuple[int, ...] | None:
        """Layers of each stage where they do not divide, which Megatron has to be told.

        As torchtitan shares them out: embedding and head count as a layer each. Raises ``SetupError``.
        """
        num_stages = split.pipeline * split.virtual
        if self.num_layers % num_stages == 0:
            return None
        return divide_layers(self.num_layers, num_stages)

    def _precisions(self, base: TrainingSetup, engine: Engine) -> list[tuple[int, Precision]]:
        """The precisions to try with an engine, and the tier of each.

        An adapter's states are in its own format, whatever the frozen weights are in.
        """
        is_frozen = base.adapter is not None
        if self.goal.precisions:
            asked = [each for each in self.goal.precisions if engine in engines_with(each)]
            chosen = [engine_precision(each, engine) for each in asked]
        else:
            has_bf16 = self.gpu.has_bf16
            chosen = [engine_precision(None, engine, has_bf16=has_bf16, is_frozen=is_frozen)]
            plain = engine in PRECISIONS[Precision.BF16].engines and engine is not Engine.MEGATRON
            if has_bf16 and not is_frozen and plain:
                chosen.append(Precision.BF16)
        return [(0 if is_frozen else _tier(each), each) for each in chosen]

    def _policies(self) -> list[Checkpointing]:
        """Policies of checkpointing, what saves most first."""
        return sorted(self._chosen_policies(), key=saving, reverse=True)

    def _chosen_policies(self) -> tuple[Checkpointing, ...]:
        if self.goal.checkpointing:
            return self.goal.checkpointing
        if not self.recomputes:
            return (Recomputation.NONE,)
        if self.goal.base.kernels is KernelPreset.HF:
            return (Recomputation.NONE, Recomputation.FULL)
        return (Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.FULL)


def saving(value: Checkpointing) -> float:
    """A policy's place among policies: what recomputes more saves more."""
    if isinstance(value, float):
        return value
    if isinstance(value, CheckpointedLayers):
        return 0.5
    return {Recomputation.NONE: 0.0, Recomputation.SELECTIVE: 0.5, Recomputation.FULL: 1.0}[value]


def _is_sensible(variant: EngineVariant, num_gpus: int, engines: tuple[Engine, ...]) -> bool:
    """One GPU has nothing to shard: there, only offloading is worth an engine."""
    if num_gpus > 1 or variant.engine is Engine.DDP or Engine.DDP not in engines:
        return True
    return variant.offloads


def _tier(precision: Precision) -> int:
    return 0 if PRECISIONS[precision].optimizer_states.num_bytes >= 4 else 1
