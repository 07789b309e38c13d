"""Evaluation between a pipeline's steps: forward passes of micro-batches without gradients.

torchtitan's ``Validator.validate`` calls ``_PipelineSchedule.eval`` of torch 2.13, which goes through as many micro-batches
as a step has; Megatron-LM's ``evaluate`` calls its schedule with ``forward_only``, and DeepSpeed 0.19.8 has ``eval_batch``,
both with as many micro-batches of a step's size as the batch has.
"""

from collections.abc import Iterable, Mapping, Sequence

from memplan.memory.account import ComponentKind
from memplan.memory.beside import SideModel
from memplan.memory.ends import batch_of
from memplan.memory.programs.other_program import OtherProgram
from memplan.memory.programs.pipeline_plan import Plan
from memplan.memory.programs.pipeline_runtime import NUM_SLOTS, Runtime, StageLink, runtime_of
from memplan.memory.programs.program import Program
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger, Part
from memplan.training.splitting.parallelism import PipelineRuntime
from memplan.training.splitting.schedules import Pass, PassKind
from memplan.units import ceil_div

MOST_ALIKE = NUM_SLOTS + 2
"""Micro-batches of which nothing stays but in slots: one behind another, further ones are as these."""


class PipelineEvaluation:
    """The passes of one rank."""

    def __init__(
        self,
        given: RankInput,
        plan: Plan,
        programs: Mapping[int, Program],
        ledger: Ledger,
        runtime: Runtime | None,
    ) -> None:
        pipeline = given.setup.pipeline
        assert pipeline is not None
        sides = {number: given.beside.models[number] for number in programs}
        self.ledger = ledger
        self.plan = plan
        self.programs = programs
        self.links = _links(given.beside.models, programs)
        self.counts_buffers = runtime is None
        """Sums are kept, of which a step's buffers are no part: what there is of them is written down."""
        if runtime is None:
            trained = {number: StageLink.of(given.stages[number].tape) for number in programs}
            runtime = runtime_of(pipeline, trained, ledger)
        self.runtime = runtime
        self.others = {number: OtherProgram(side, ledger) for number, side in sides.items()}
        for number, other in self.others.items():
            other.borrow(programs[number])
            other.program.playback.workspaces = programs[number].playback.workspaces
        side = next(iter(sides.values()))
        assert side.evaluation is not None
        self.num_micro_batches = ceil_div(side.evaluation.batch_size, side.tape.options.batch_size)
        together = self.num_micro_batches if pipeline.num_batches > 1 else 1
        self.batch = [together * size for size in batch_of(side.tape)]
        self.passes = self._passes(pipeline.runtime)
        self.has_run = False

    def _passes(self, runtime: PipelineRuntime) -> tuple[tuple[Pass, int], ...]:
        """Forward passes in order, each with its place in the plan of a step, if it goes by that."""
        if runtime is PipelineRuntime.TORCH:
            return tuple(
                (each, number)
                for number, each in enumerate(self.plan.passes)
                if each.kind is PassKind.FORWARD and each.micro_batch < self.num_micro_batches
            )
        batches = range(min(self.num_micro_batches, MOST_ALIKE))
        return tuple(
            (Pass(PassKind.FORWARD, stage, batch), -1)
            for batch in batches
            for stage in self.programs
        )

    def run(self, step: int) -> None:
        """All micro-batches of a batch."""
        ledger, runtime = self.ledger, self.runtime
        ledger.enter(Part.EVALUATION, step)
        self.has_run = True
        if self.counts_buffers:
            self.runtime.rest()
        kind, name = ComponentKind.INPUTS, "token ids and labels to evaluate"
        inputs = [ledger.allocate(size, 0, kind, name) for size in self.batch]
        runtime.begin_evaluation(self.links)
        ends = self._ends() if self.counts_buffers else None
        for number, (each, place) in enumerate(self.passes):
            if place >= 0 and self.plan.wanted:
                self._gather(self.plan.wanted[place])
            link = self.links[each.stage]
            runtime.before_evaluated(each, link)
            if ends is None or number in ends:
                self.programs[each.stage].prepare_forward()
                self.others[each.stage].run()
            runtime.after_evaluated(each, link)
        runtime.end_evaluation(self.links, self.num_micro_batches)
        for program in self.programs.values():
            program.reshard()
        ledger.free_all(inputs)

    def _ends(self) -> frozenset[int]:
        """Of each stage's passes the first and the last one tell all: what stays grows by the same each time."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, (each, _) in enumerate(self.passes):
            first.setdefault(each.stage, number)
            last[each.stage] = number
        return frozenset((*first.values(), *last.values()))

    def _gather(self, wanted: tuple[int, ...]) -> None:
        for stage, program in self.programs.items():
            if stage not in wanted:
                program.reshard()
        for stage in wanted:
            self.programs[stage].unshard()

    def resume(self) -> None:
        """The next step begins: what an evaluation left goes first, and is none of the step's."""
        if not self.has_run:
            return
        self.ledger.enter(Part.EVALUATION)
        self.runtime.resume()
        if self.counts_buffers:
            self.runtime.close()


def _links(sides: Sequence[SideModel], numbers: Iterable[int]) -> dict[int, StageLink]:
    """Of a rank's stages; what one receives is what the one before returns."""
    found: dict[int, StageLink] = {}
    for number in numbers:
        before = StageLink.between(sides[number - 1].tape, 0) if number else None
        received = 0 if before is None else before.returned_bytes
        found[number] = StageLink.between(sides[number].tape, received)
    return found
