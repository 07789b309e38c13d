"""Evaluation between steps: batches without gradients, and what the loop keeps of them.

The order is that of transformers 5.23 (``Trainer.evaluation_loop``, ``prediction_step``, ``EvalLoopContainer``) and
accelerate 1.15 (``_gpu_gather``), held against runs of PyTorch's CUDA build.
"""

from memplan.memory.account import ComponentKind
from memplan.memory.beside import SideModel, When
from memplan.memory.ends import batch_of
from memplan.memory.programs.contracts import RankProgram
from memplan.memory.programs.other_program import OtherProgram
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.evaluation import Evaluation

LOSS_ONLY_BATCHES = 2
"""Batches of which nothing stays: one behind another, further ones are as the second."""
EDGE_BATCHES = 2
"""Of many batches whose logits stay the first and the last of a round are played out."""
ROUNDS = 2
"""Of batches that go to the CPU together; every later one is as the second."""

_LOGITS, _INPUTS = ComponentKind.LOGITS_AND_LOSS, ComponentKind.INPUTS


class EvaluationProgram(OtherProgram):
    """Passes of the trained model over batches of their own size."""

    def __init__(
        self, side: SideModel, how: Evaluation, ledger: Ledger, trained: RankProgram
    ) -> None:
        super().__init__(side, ledger)
        self.borrow(trained)
        self.how = how
        self.keeps = how.num_kept > 0 and side.tape.outputs_bytes > 0
        """Logits of whole batches stay; of a class for each sequence nothing is said."""
        self.inputs: list[Block] = []
        """The batch that the loop's variable names."""
        self.logits: Block | None = None
        """The logits that its variable names, gathered from all ranks."""
        self.kept: Block | None = None
        """Logits of several batches, joined."""
        self.num_kept = 0

    def _pass(self) -> None:
        """Rounds of batches, between which the logits go to the CPU."""
        rounds = 1 if self.how.accumulation_steps is None else ROUNDS
        for _ in range(rounds):
            for number in self._batches():
                self._evaluate(number)
            self._let_go()
            if self.how.accumulation_steps is not None:
                self.ledger.empty_cache()

    def _batches(self) -> list[int]:
        """Numbers of the batches of a round that are played out."""
        kept = self.how.num_kept
        if not self.keeps:
            return list(
                range(min(self.how.accumulation_steps or LOSS_ONLY_BATCHES, LOSS_ONLY_BATCHES))
            )
        return [each for each in range(kept) if not EDGE_BATCHES <= each < kept - EDGE_BATCHES]

    def _evaluate(self, number: int) -> None:
        """One batch: it comes, the model runs, and what is to stay is gathered and joined."""
        ledger = self.ledger
        tape = self.side.tape
        before, name = self.inputs, "token ids and labels to evaluate"
        self.inputs = [ledger.allocate(size, 0, _INPUTS, name) for size in batch_of(tape)]
        _free(ledger, *before)
        program = self.program
        for when in (When.ROLLOUT, When.FIRST):
            if program.company is not None:
                program.company.run(when)
        program.begin_pass()
        program.playback.forward()
        program.playback.return_loss()
        program.end_pass()
        if not self.keeps:
            program.playback.let_go()
            return
        self._keep(number, program.playback.hand_outputs_over("logits of an evaluation batch"))

    def _keep(self, number: int, logits: Block) -> None:
        """Gathered from all ranks; then joined to those of the batches before."""
        ledger = self.ledger
        size, ranks = self.side.tape.outputs_bytes, self.side.setup.data_parallel
        _free(ledger, self.logits if self.num_kept != 1 else None)
        if ranks > 1:
            name = "logits of an evaluation batch, of all ranks"
            gathered = ledger.allocate(size * ranks, 0, _LOGITS, name)
            ledger.free(logits)
            logits = gathered
        if self.kept is None:
            self.kept = logits
        else:
            name = "logits of evaluation batches, joined"
            joined = ledger.allocate(size * ranks * (number + 1), 0, _LOGITS, name)
            ledger.free(self.kept)
            self.kept = joined
        self.logits = logits
        self.num_kept = number + 1

    def _let_go(self) -> None:
        """The logits are on the CPU; the loop's variables go."""
        _free(self.ledger, self.kept)
        if self.num_kept != 1:
            _free(self.ledger, self.logits)
        _free(self.ledger, *self.inputs)
        self.kept = self.logits = None
        self.inputs = []
        self.num_kept = 0


def _free(ledger: Ledger, *blocks: Block | None) -> None:
    for block in blocks:
        if block is not None:
            ledger.free(block)
