"""Programs of a job's other models, run beside that of the trained one."""

from collections.abc import Iterable, Mapping

from memplan.fast_dataclass import replace
from memplan.memory.account import ComponentKind
from memplan.memory.beside import Beside, Share, SideModel, When
from memplan.memory.programs.contracts import RankProgram
from memplan.memory.programs.other_program import OtherProgram
from memplan.memory.programs.program import Program
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.training.choices import ZeroStage
from memplan.training.precision import Engine


def _other_program(side: SideModel, ledger: Ledger, trained: RankProgram) -> OtherProgram:
    if side.evaluation is None:
        other = OtherProgram(side, ledger)
    else:
        from memplan.memory.programs.evaluation import EvaluationProgram  # only where there is one

        other = EvaluationProgram(side, side.evaluation, ledger, trained)
    if isinstance(trained, Program):
        other.program.playback.workspaces = trained.playback.workspaces
    return other


def shards_frozen_models(engine: Engine, stage: ZeroStage | None, num_ranks: int) -> bool:
    """Whether an engine shards a frozen model too: ZeRO-3 and FSDP do, the others replicate it.

    (TRL 1.16, ``models/utils.py``: ``prepare_deepspeed``, ``prepare_fsdp``)
    """
    if engine is Engine.DEEPSPEED:
        return stage is ZeroStage.PARAMETERS
    return engine in (Engine.FSDP, Engine.FSDP1) and num_ranks > 1


_OF_A_STEP = frozenset({When.ROLLOUT, When.FIRST, When.JOINED})


class OtherModels:
    """All of a job's other models, and its shares of the card."""

    def __init__(self, beside: Beside, ledger: Ledger, trained: RankProgram) -> None:
        self.ledger = ledger
        self.shares = beside.shares
        steps = [each for each in beside.models if not each.of_evaluation]
        self.others = [_other_program(each, ledger, trained) for each in steps]
        attending = tuple(each for each in beside.models if each.of_evaluation)
        owners = {each.side.role: each for each in self.others if each.side.owns_weights}
        for each in self.others:
            owner = owners.get(each.side.role)
            if owner is not each and (owner is not None or each.side.when in _OF_A_STEP):
                each.borrow(trained if owner is None else owner.program)
        for each in self._at(When.EVALUATION) if attending else ():
            each.program.company = self._with_evaluation(attending, each, owners)

    def _with_evaluation(
        self,
        models: tuple[SideModel, ...],
        evaluated: OtherProgram,
        owners: Mapping[str, OtherProgram],
    ) -> "OtherModels":
        """Those that run with its passes, over weights that are there."""
        found = OtherModels(
            Beside(models=tuple(replace(each, of_evaluation=False) for each in models)),
            self.ledger, evaluated.program,
        )  # fmt: skip
        for each in found.others:
            each.borrow(owners.get(each.side.role, evaluated).program)
        return found

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
