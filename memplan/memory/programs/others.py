"""Programs of a job's other models, run beside that of the trained one."""

from collections.abc import Iterable

from memplan.memory.account import ComponentKind
from memplan.memory.beside import Beside, Share, SideLedger, SideModel, When
from memplan.memory.ledger import Block, Ledger, Part
from memplan.memory.programs.program import Program, RankProgram
from memplan.memory.rank import RankInput
from memplan.training.choices import ZeroStage
from memplan.training.precision import Engine

_CACHE = ComponentKind.ROLLOUT_ENGINE


class OtherProgram:
    """One other model, or a pass of the trained one without gradients."""

    def __init__(self, side: SideModel, ledger: Ledger) -> None:
        self.side = side
        self.ledger = ledger
        self.program = _program(side, SideLedger(ledger, side.role))

    def load(self) -> None:
        """Its weights, if they are not the trained model's."""
        if self.side.owns_weights:
            self.program.load()
        if self.side.is_trained:
            self.program.make_optimizer()

    def settle(self, *, num_micro_batches: int) -> None:
        """Come to where every further step is like the last."""
        if self.side.when is When.OWN_STEP:
            self.program.settle(num_micro_batches=num_micro_batches)

    def train(self, step: int, *, num_micro_batches: int) -> None:
        """A step of its own."""
        self.program.train(step, num_micro_batches=num_micro_batches)

    def run(self) -> None:
        """One pass without gradients."""
        kept: Block | None = None
        if self.side.kept_bytes:
            kept = self.ledger.allocate(self.side.kept_bytes, 0, _CACHE, self.side.kept_words)
        program = self.program
        program.begin_pass()
        program.playback.forward()
        program.end_forward()
        program.playback.return_loss()
        program.end_pass()
        program.playback.let_go()
        if kept is not None:
            self.ledger.free(kept)


def _other_program(side: SideModel, ledger: Ledger, trained: RankProgram) -> OtherProgram:
    if side.evaluation is None:
        return OtherProgram(side, ledger)
    from memplan.memory.programs.evaluation import EvaluationProgram  # only where there is one

    return EvaluationProgram(side, side.evaluation, ledger, trained)


def _program(side: SideModel, ledger: SideLedger) -> Program:
    """Sharded as its engine does with frozen weights, or whole."""
    given = RankInput(tape=side.tape, passes=side.passes, setup=side.setup)
    if side.when is When.OWN_STEP:
        from memplan.memory.programs import engine_program

        return engine_program(given, ledger, workspace_bytes=0)
    if not side.is_sharded:
        return Program(given, ledger)
    engine = side.setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        from memplan.memory.deepspeed.job import prepare_job
        from memplan.memory.programs.frozen_shards import FrozenShardsProgram

        return FrozenShardsProgram(prepare_job(given, rank=0, capacity_bytes=None), ledger)
    if engine is Engine.FSDP and side.is_one_unit:
        from memplan.memory.programs.gathered_whole import GatheredWholeProgram

        return GatheredWholeProgram(given, ledger)
    from memplan.memory.programs import engine_program

    return engine_program(given, ledger, workspace_bytes=0)


def shards_frozen_models(engine: Engine, stage: ZeroStage | None, num_ranks: int) -> bool:
    """Whether an engine shards a frozen model too: ZeRO-3 and FSDP do, the others replicate it.

    (TRL 1.16, ``models/utils.py``: ``prepare_deepspeed``, ``prepare_fsdp``)
    """
    if engine is Engine.DEEPSPEED:
        return stage is ZeroStage.PARAMETERS
    return engine in (Engine.FSDP, Engine.FSDP1) and num_ranks > 1


class OtherModels:
    """All of a job's other models, and its shares of the card."""

    def __init__(self, beside: Beside, ledger: Ledger, trained: RankProgram) -> None:
        self.ledger = ledger
        self.shares = beside.shares
        self.others = [_other_program(each, ledger, trained) for each in beside.models]

    def load(self) -> None:
        """Everything that stays."""
        for each in self.others:
            each.load()
        for share in self.shares:
            if share.only_in is None:
                self._take(share)

    def _take(self, share: Share) -> Block:
        return self.ledger.allocate(share.num_bytes, 0, ComponentKind.ROLLOUT_ENGINE, share.words)

    def settle(self, *, num_micro_batches: int) -> None:
        """Those that are trained."""
        for each in self.others:
            each.settle(num_micro_batches=num_micro_batches)

    def _at(self, when: When) -> Iterable[OtherProgram]:
        return (each for each in self.others if each.side.when is when)

    def run(self, when: When) -> None:
        """The passes that run there."""
        for each in self._at(when):
            each.run()

    def before_step(self, step: int, *, num_micro_batches: int) -> None:
        """Completions are generated and scored; then others are trained."""
        rollouts = list(self._at(When.ROLLOUT))
        shares = [each for each in self.shares if each.only_in is Part.GENERATION]
        if rollouts or shares:
            self.ledger.enter(Part.GENERATION, step)
            self._wake(shares)
            for each in rollouts:
                each.run()
        for each in self._at(When.OWN_STEP):
            each.train(step, num_micro_batches=num_micro_batches)

    def _wake(self, shares: list[Share]) -> None:
        """An engine that sleeps otherwise has its share unmapped then: nothing of it stays cached.

        (TRL 1.16 empties the cache before it wakes vLLM, ``generation/vllm_generation.py``)
        """
        for each in shares:
            self.ledger.empty_cache()
            self.ledger.free(self._take(each))
            self.ledger.empty_cache()

    def evaluate(self, step: int) -> None:
        """Between steps."""
        passes = list(self._at(When.EVALUATION))
        if passes:
            self.ledger.enter(Part.EVALUATION, step)
            for each in passes:
                each.run()
