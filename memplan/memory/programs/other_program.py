"""The program of one of a job's other models."""

from memplan.memory.account import ComponentKind
from memplan.memory.beside import SideLedger, SideModel, When
from memplan.memory.programs.contracts import RankProgram
from memplan.memory.programs.program import Program
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.precision import Engine

_CACHE = ComponentKind.ROLLOUT_ENGINE


class OtherProgram:
    """One other model, or a pass of the trained one without gradients."""

    def __init__(self, side: SideModel, ledger: Ledger) -> None:
        self.side = side
        self.ledger = ledger
        self.program = _program(side, SideLedger(ledger, side.role))
        self.borrowed: Program | None = None
        """Whose weights they are, where these are gathered for a pass."""

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
        """One pass without gradients, over what an earlier one left gathered."""
        if self.borrowed is not None:
            self.program.take_over(self.borrowed)
        self._pass()
        if self.borrowed is not None:
            self.borrowed.take_over(self.program)

    def borrow(self, lender: RankProgram) -> None:
        """The weights are another program's: what that left gathered is there, and the other way round.

        A pass over fewer of them, with the adapter switched off, counts by itself.
        """
        self.borrowed = None
        is_same = len(lender.weights) == len(self.program.weights)
        if isinstance(lender, Program) and self.side.is_sharded and is_same:
            self.borrowed = lender

    def _pass(self) -> None:
        kept: Block | None = None
        if self.side.kept_bytes:
            kept = self.ledger.allocate(self.side.kept_bytes, 0, _CACHE, self.side.kept_words)
        program = self.program
        program.begin_pass()
        program.playback.forward()
        program.playback.return_loss()
        program.end_pass()
        program.playback.let_go()
        if kept is not None:
            self.ledger.free(kept)


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
        from memplan.memory.programs.deepspeed_stages.frozen_shards import FrozenShardsProgram

        return FrozenShardsProgram(prepare_job(given, rank=0, capacity_bytes=None), ledger)
    if engine is Engine.FSDP and side.is_one_unit:
        from memplan.memory.programs.fully_sharded.gathered_whole import GatheredWholeProgram

        return GatheredWholeProgram(given, ledger)
    from memplan.memory.programs import engine_program

    return engine_program(given, ledger, workspace_bytes=0)
