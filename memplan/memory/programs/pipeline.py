"""A rank of a pipeline: its stages' programs, run pass by pass as the schedule says.

Each stage has its engine's own program (its weights, gradients, optimizer and buckets); this one runs
their passes in turn, several micro-batches in flight, and lets the runtime hold what lies between stages.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from memplan.fast_dataclass import replace
from memplan.graph.core.tensors import Parameter
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.beside import ALONE
from memplan.memory.outline import NO_CROWD
from memplan.memory.programs.chunk_offload import LEAST_BYTES, ChunkOffload, chunk_sizes
from memplan.memory.programs.contracts import run_steps
from memplan.memory.programs.pipeline_plan import plan_of, shape_of
from memplan.memory.programs.pipeline_ranks import place_of
from memplan.memory.programs.pipeline_runtime import Runtime, StageLink, runtime_of
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import Weight
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger, Part
from memplan.memory.tally import Tally, TallyPlayback
from memplan.training.splitting.schedules import Pass, PassKind

if TYPE_CHECKING:
    from memplan.memory.programs.pipeline_again import PassesAgain
    from memplan.memory.programs.pipeline_evaluation import PipelineEvaluation

MakeProgram = Callable[[RankInput], Program]
"""A stage's own program."""


class PipelineProgram:
    """One rank of a pipeline."""

    def __init__(self, given: RankInput, ledger: Ledger, make: MakeProgram, *, rank: int) -> None:
        pipeline = given.setup.pipeline
        assert pipeline is not None
        self.given = given
        self.ledger = ledger
        place = place_of(given, rank)
        self.shape = shape_of(given, place)
        self.plan = plan_of(self.shape)
        self.passes = self.plan.passes
        numbers = self.shape.stages
        self.programs = {number: make(_stage_input(given, number)) for number in numbers}
        """By the stage's number."""
        self.last = {each.stage: number for number, each in enumerate(self.passes)}
        """The last pass of each stage."""
        links = {number: StageLink.of(given.stages[number].tape) for number in numbers}
        self.tally = ledger if isinstance(ledger, Tally) else None
        """Where sums are kept: what is between the passes is there in counts already."""
        self.runtime = Runtime(pipeline, links, ledger)
        self.offload: ChunkOffload | None = None
        if self.tally is not None:
            self.tally.outline.crowds = self.plan.crowds
            self.tally.outline.rest_group = self.plan.rest
        else:
            self.runtime = runtime_of(pipeline, links, ledger)
            self.offload = self._offload()
        first = self.programs[numbers[0]]
        self.weight_words: Mapping[ComponentKind, str] = first.weight_words
        self.left_out = first.left_out
        self.unsaved = first.unsaved
        self.num_steps = first.num_steps
        for program in self.programs.values():
            program.share(first)
            program.playback.workspaces = first.playback.workspaces
        self.evaluation = None if given.beside is ALONE else self._evaluation()
        self.again = self._again()

    def _evaluation(self) -> "PipelineEvaluation":
        from memplan.memory.programs.pipeline_evaluation import PipelineEvaluation  # only then

        runtime = None if self.tally is not None else self.runtime
        return PipelineEvaluation(self.given, self.plan, self.programs, self.ledger, runtime)

    def _again(self) -> "PassesAgain | None":
        """Writes passes down as others were played; None: what is beside them is told by no pass, or each is told apart."""
        if self.tally is not None or self.offload is not None or self.evaluation is not None:
            return None
        if not (self.ledger.repeats and self.runtime.holds_nothing):
            return None
        # Only where it is played out.
        from memplan.memory.programs.pipeline_again import PassesAgain

        told = {
            group for number, group in enumerate(self.plan.groups) if number not in self.plan.played
        }
        return PassesAgain(self.ledger, told)

    def _offload(self) -> ChunkOffload | None:
        sizes = chunk_sizes(self.given, self.programs)
        if not any(sizes.values()):
            return None

        def send(each: Pass) -> None:
            playback = self.programs[each.stage].playback
            playback.send(each.micro_batch, sizes[each.stage], LEAST_BYTES)

        return ChunkOffload(sizes, max(sizes.values()), self.passes, self.ledger, send)

    @property
    def weights(self) -> list[Weight]:
        """Of all its stages."""
        return [weight for program in self.programs.values() for weight in program.weights]

    @property
    def off_gpu_bytes(self) -> int:
        """States of the optimizers that are not on the GPU."""
        return sum(program.off_gpu_bytes for program in self.programs.values())

    # -- a run -----------------------------------------------------------------------------------

    def run(self, *, num_steps: int | None = None) -> None:
        """Load, then train; the optimizers' states come with the first step."""
        self.start()
        run_steps(self, num_steps or self.num_steps)

    def run_step(self, step: int) -> None:
        """One step, and what runs behind it."""
        self.train(step, num_micro_batches=len(self.passes))
        self.evaluate(step)

    def start(self) -> None:
        """Load every stage; the batch of a whole step; the runtime's buffers."""
        self.ledger.enter(Part.LOAD)
        for program in self.programs.values():
            program.load()
        for program in self.programs.values():
            program.make_optimizer()
        self.ledger.enter(Part.FORWARD)
        self._fetch_batch()
        self._beside(self.plan.begun)
        self.runtime.begin()
        if self.offload is not None:
            self.offload.begin()

    def _fetch_batch(self) -> None:
        pipeline = self.given.setup.pipeline
        assert pipeline is not None
        for _ in range(pipeline.num_batches):
            next(iter(self.programs.values())).playback.fetch_batch()

    def settle(self, *, num_micro_batches: int) -> None:  # noqa: ARG002
        """Come to where every further step is like the last: here, to where there are states."""
        for program in self.programs.values():
            program.settle(num_micro_batches=1)

    def train(self, step: int, *, num_micro_batches: int) -> None:  # noqa: ARG002
        """One step: the whole schedule, and the updates."""
        if self.evaluation is not None:
            self.evaluation.resume()
        self.runtime.begin_step()
        for number, each in enumerate(self.passes):
            is_played = self.tally is None or number in self.plan.played
            self._beside(self.plan.groups[number] if is_played else None)
            if self.plan.wanted:
                self._gather(self.plan.wanted[number])
            if self.offload is not None:
                self.offload.before(each)
            if not is_played:
                self._pass_over(each)
                continue
            self.ledger.begin_pass(number)
            self._play(number, step)
            if number == self.last[each.stage]:
                self._beside(self.plan.behind[number])
                self.programs[each.stage].reduce_gradients()
            if self.offload is not None:
                self.offload.after(each)
        self._beside(self.plan.returned)
        self.runtime.end_step()
        self._beside(self.plan.rest)
        self.ledger.enter(Part.STEP, step)
        for program in self.programs.values():
            program.optimizer_step(first=step == 0)
        for program in self.programs.values():
            program.zero_grad()

    def _beside(self, group: int | None) -> None:
        """What follows has one of a group of crowds beside it; None: another pass tells of it."""
        if self.tally is not None and (group is not None or self.tally.is_noting):
            self.tally.beside(group)

    def _gather(self, wanted: tuple[int, ...]) -> None:
        """Only the stages that run next have their weights gathered."""
        for stage, program in self.programs.items():
            if stage not in wanted:
                program.reshard()
        for stage in wanted:
            self.programs[stage].unshard()

    def _play(self, number: int, step: int) -> None:
        """A pass, as it was played before where another one tells of it."""
        each, again = self.passes[number], self.again
        if again is None:
            self._run(each, step)
            return
        group, playback = self.plan.groups[number], self.programs[each.stage].playback
        if number in self.plan.played or not again.knows(group):
            again.play(group, each, playback, partial(self._run, each, step))
            return
        is_forward = each.kind is PassKind.FORWARD
        self.ledger.enter(Part.FORWARD if is_forward else Part.BACKWARD, step)
        again.write(group, each, playback)

    def _run(self, each: Pass, step: int) -> None:
        program, runtime = self.programs[each.stage], self.runtime
        if each.kind is PassKind.FORWARD:
            self.ledger.enter(Part.FORWARD, step)
            runtime.before_forward(each)
            program.prepare_forward()
            program.forward_pass()
            program.playback.park(each.micro_batch)
            runtime.after_forward(each)
            return
        is_first = runtime.links[each.stage].is_first
        if is_first and each.kind is PassKind.INPUT:
            return  # It has no input that wants a gradient: all of it is left to the weights' pass.
        self.ledger.enter(Part.BACKWARD, step)
        program.playback.resume(each.micro_batch)
        program.prepare_backward(last=self.plan.passes[self.last[each.stage]] is each)
        if each.kind is PassKind.INPUT:
            program.inputs_pass()
            program.playback.park(each.micro_batch)
        elif each.kind is PassKind.WEIGHT and not is_first:
            program.weights_pass()
        else:
            program.backward_pass()
        runtime.after_backward(each)

    def _pass_over(self, each: Pass) -> None:
        """A pass that another one of its kind tells of: what it leaves, without a walk."""
        program = self.programs[each.stage]
        player = program.playback
        assert isinstance(player, TallyPlayback)
        if each.kind is PassKind.FORWARD:
            program.prepare_forward()
            player.pass_over_forward()
            player.park(each.micro_batch)
            return
        is_first = self.runtime.links[each.stage].is_first
        if is_first and each.kind is PassKind.INPUT:
            return
        player.resume(each.micro_batch)
        program.prepare_backward(last=False)
        if each.kind is PassKind.INPUT or not is_first:
            program.pass_over(each.kind)
        if each.kind is PassKind.INPUT:
            player.pass_over_inputs()
            player.park(each.micro_batch)
        else:
            player.let_go()

    def evaluate(self, step: int) -> None:
        """Forward passes between steps, if any."""
        if self.evaluation is not None:
            self._beside(NO_CROWD)
            self.evaluation.run(step)
            if self.tally is not None and not step:
                self.evaluation.resume()  # What comes next in sums is a step's.

    def save(self) -> None:
        """Each stage's own part of a checkpoint."""
        for program in self.programs.values():
            program.save()

    def host_memory(self) -> HostMemory:
        """CPU RAM of all its stages."""
        found = HostMemory()
        for program in self.programs.values():
            own = program.host_memory()
            found = replace(
                found,
                held_bytes=found.held_bytes + own.held_bytes,
                load_bytes=found.load_bytes + own.load_bytes,
                save_bytes=found.save_bytes + own.save_bytes,
                writer_bytes=found.writer_bytes + own.writer_bytes,
                pinned_bytes=found.pinned_bytes + own.pinned_bytes,
            )
        return found

    def kept_numel(self, parameter: Parameter) -> int:
        """Elements of a weight that this rank keeps between steps."""
        return next(iter(self.programs.values())).kept_numel(parameter)


def _stage_input(given: RankInput, number: int) -> RankInput:
    stage = given.stages[number]
    return replace(given, tape=stage.tape, passes=stage.passes, stages=(), beside=ALONE)
