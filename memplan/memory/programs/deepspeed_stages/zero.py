"""What the programs of all of DeepSpeed's stages share."""

from collections.abc import Iterable, Sequence

from memplan.dtypes import DType
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, allocated_bytes
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.deepspeed.host import saved_bytes, writer_bytes
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.reduction import NORM_BYTES
from memplan.memory.programs.program import Program
from memplan.memory.programs.stepping import stepped_all
from memplan.memory.programs.weights import Weight
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.training.optimizers.script import Stepped
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks

SCALED_LOSSES = "loss over the accumulated micro-batches", "scaled loss"
"""What engines with an optimizer of ZeRO's make of it, be both numbers one (``backward``, ``scale_if_loss``)."""
_WHOLE = "whole weights, by the optimizer that was made first"
HOST_PASSES_BYTES = 14
"""Of each fp32 master on the CPU, what is read and written beside Adam's own update: the gradient scaled in place
(``unscale_and_clip_grads``), the new weight cast."""


BESIDE_WHOLE_NORM = 4
"""Numbers that are there when the norm of all groups is made: theirs in one tensor, whether one is none, the norm, infinity."""


class DeepSpeedProgram(Program):
    """One rank of DeepSpeed, whatever its stage."""

    num_steps = 3
    """On a card that is just too small a run can die in its third step: 4 of 13 on the CUDA build."""

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job.given, ledger, workspace_bytes=workspace_bytes)
        self.job = job
        self.left_out += job.options.left_out
        self.unsaved = job.options.unsaved
        self.numbers = job.weights.numbers
        self.ranks = Ranks(job.num_ranks)
        """Over which states are spread."""
        self.is_wrapped = True
        """The optimizer steps other tensors than the model's own parameters."""
        self.last = True
        """The optimizer steps after this micro-batch."""
        self.adds = False
        """This micro-batch's gradients are added to those of earlier ones."""
        self.norm: Block | None = None

    def number(self, weight: Weight) -> int:
        """Where a weight stands among all parameters."""
        numbers = self.numbers
        found = numbers.get(weight)
        if found is None:
            found = numbers[weight] = self.job.weights.number(*weight)
        return found

    @property
    def copied_weights(self) -> frozenset[int]:
        """Copies of tied weights, which the first stage measures (``ds_pipe_replicated``)."""
        tape = self.given.tape
        stage = tape.options.stage
        if stage is None or not stage.has_copy:
            return frozenset()
        return frozenset(self.number((each, 0)) for each in tape.segments[-1].parameters)

    def load_model(self) -> dict[Weight, Block]:
        """Every weight, whole; then the engine's first optimizer (``basic_optimizer``) is made of these.

        What the stage steps is made anew, and the first one is kept: where states come with the optimizer
        (torch's Adagrad) they are there twice (engine.py, ``_configure_optimizer``;
        zero/stage_1_and_2.py and zero/stage3.py, ``initialize_optimizer_states``).
        """
        loaded = super().load_model()
        if self.is_wrapped and not self.job.offloads_optimizer:
            trained = stepped_all(weight[0] for weight in self.weights if weight[0].requires_grad)
            self.optimizer.construct_another(trained, of=_WHOLE)
        return loaded

    def make_optimizer(self) -> None:
        """States are of master weights, which come later than the optimizer."""

    @property
    def trained(self) -> list[Weight]:
        """What the optimizer steps, as the model declares it."""
        kept = [weight for weight in self.weights if weight[0].requires_grad]
        return sorted(kept, key=self.number)

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:
        """Note whether the optimizer steps after it; ``engine.step()`` is called all the same."""
        self.adds = not self.last
        self.last = last
        super().micro_batch(step, first=first, last=last)
        if not last:
            self.ledger.enter(Part.STEP, step)

    def prepare_backward(self, *, last: bool) -> None:  # noqa: ARG002
        """No backward pass of a pipeline reduces: what comes behind the last one does."""
        self.last = False

    def reduce_gradients(self) -> None:
        """``ReduceGrads`` of a pipeline's schedule."""
        self.last = True
        self.end_backward()

    def host_memory(self) -> HostMemory:
        """The model while it is loaded, and a checkpoint on its way."""
        return self.replicated_memory(part_numel=self.job.weights.num_trained)

    def replicated_memory(self, *, part_numel: int) -> HostMemory:
        """Where every rank holds all weights on its GPU, and so many elements of the states."""
        job = self.job
        return HostMemory(
            load_bytes=job.model_bytes,
            save_bytes=saved_bytes(job, part_numel=part_numel),
            writer_bytes=writer_bytes(job, part_numel=part_numel),
        )

    def allocate(
        self, num_bytes: int, kind: ComponentKind, name: str | Weight, *, stream: int = 0
    ) -> Block:
        """Ask for a block, rounded up as the allocator does."""
        return self.ledger.allocate(rounded(num_bytes), stream, kind, name)

    def norm_of(self, numels: Sequence[int], *, name: str, beside: int = 0) -> Block:
        """The norm of gradients of these sizes [elements], made where so many numbers are ``beside`` that go.

        Each is copied to fp64, and what it comes to stays until all are summed up (``get_grad_norm_direct``): such
        small blocks decide where in their segments those lie that outlast the step.
        """
        sizes = (rounded(NORM_BYTES * numel) for numel in numels if numel)
        norms = self.ledger.use_in_turn(
            sizes, kind=ComponentKind.TEMPORARIES, name=name, left_bytes=ALLOCATION_ROUNDING
        )
        found = self._number_beside(beside, name)
        self.free_all(norms)
        return found

    def norm_of_all(self, *, name: str) -> Block:
        """That of all groups' norms (``combine_grad_norm_groups``)."""
        return self._number_beside(BESIDE_WHOLE_NORM, name)

    def _number_beside(self, count: int, name: str) -> Block:
        kind = ComponentKind.TEMPORARIES
        *others, found = [self.allocate(NORM_BYTES, kind, name) for _ in range(count + 1)]
        self.free_all(others)
        return found

    def keep_norm(self) -> list[Block]:
        """The norm of all gradients is there until the next step's end: the engine has it too (``_global_grad_norm``).
        Returned is the last step's, where there was one."""
        former = [] if self.norm is None else [self.norm]
        kind = ComponentKind.TEMPORARIES
        self.norm = self.allocate(DType.FP32.num_bytes, kind, "norm of all gradients")
        return former

    def use(self, *sizes: int, kind: ComponentKind, name: str | Weight, stream: int = 0) -> None:
        """Ask for blocks that are all given back at once."""
        kept = [rounded(size) for size in sizes if size]
        self.ledger.use(*kept, stream=stream, kind=kind, name=name)

    def use_in_turn(self, sizes: Iterable[int], *, name: str, stream: int = 0) -> None:
        """Copies of these sizes, each given back before the next; of what is empty there is none."""
        kept = (rounded(size) for size in sizes if size)
        self.ledger.use_in_turn(kept, stream=stream, kind=ComponentKind.TEMPORARIES, name=name)

    def free_all(self, blocks: list[Block]) -> None:
        """Give blocks back, the first one first."""
        self.ledger.free_all(blocks)
        blocks.clear()

    def make_over_masters(self, numels: Sequence[int], *, of: str) -> None:
        """The optimizer that steps flat masters of these sizes [elements], made while each has a gradient of zeros."""
        self.optimizer.construct(self._masters(numels), of=of)

    def step_masters(self, numels: Sequence[int], *, of: str, first: bool) -> None:
        """One step over flat masters of these sizes [elements]."""
        self.optimizer.step(self._masters(numels), of=of, first=first)

    def _masters(self, numels: Sequence[int]) -> list[Stepped]:
        dtype = DType.BF16 if self.job.options.bf16_masters else DType.FP32
        return [Stepped((numel,), dtype) for numel in numels]

    def step_on_host(self, numel: int) -> None:
        """The optimizer's step over so many elements of fp32 masters in CPU RAM, and the new weights'
        way to the GPU (``DeepSpeedCPUAdam``).

        ZenFlow does so once in ``zenflow_interval`` steps, of each of which this is a share, and beside the next ones with ``overlap_step``
        (``zenflow_cpu_optimizer_step``, ``wait_last_update_and_copy`` in runtime/zenflow/zenflow_stage_1_and_2.py); SuperOffload without clipping
        beside the backward pass (``partition_grads`` in runtime/superoffload/superoffload_stage3.py).
        """
        masters = Stepped((numel,), DType.FP32)
        moved = self.optimizer.moved_bytes([masters])
        if self.job.swaps_optimizer:
            # Each group of states is read, stepped and written again, with pipeline_read and pipeline_write
            # off as they are by default; gradients went there in the backward pass.
            gradients = numel * DType.FP32.num_bytes
            states = (moved - gradients) // 2
            self.ledger.exchange(ExchangeKind.TO_STORAGE, gradients)
            self.ledger.exchange(ExchangeKind.FROM_STORAGE, states + gradients)
            self.ledger.exchange(ExchangeKind.TO_STORAGE, states)
        moved += HOST_PASSES_BYTES * numel
        moved //= self.job.options.zenflow_interval
        self.ledger.exchange(ExchangeKind.HOST_UPDATE, moved, hiding=self._hiding_of_step)

    @property
    def _hiding_of_step(self) -> Hiding:
        """What the CPU's step runs beside."""
        if self.job.options.steps_beside_backward:
            return Hiding.BEHIND
        return Hiding.AHEAD if self.job.options.zenflow_overlaps else Hiding.NONE

    @property
    def hiding(self) -> Hiding:
        """Whether gradients are reduced beside the backward pass."""
        return Hiding.BEHIND if self.job.options.overlap_comm else Hiding.NONE

    def copied(self, weight: Weight) -> int:
        """A copy of a weight in its own dtype [bytes]."""
        return allocated_bytes(weight[0].numel, self.given.formats.weights)
