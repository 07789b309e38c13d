"""Stages 1 and 2 of ZeRO (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py)."""

from memplan.graph.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.job import MASTER_BYTES, Job
from memplan.memory.ledger import Block, Ledger
from memplan.memory.programs.program import Weight, step_optimizer
from memplan.memory.programs.zero import DeepSpeedProgram
from memplan.training.setup import ZeroStage
from memplan.units import round_up

NORM_BYTES = 8
"""Of an element while a gradient's norm is taken: fp64 (runtime/utils.py, ``get_norm_dtype``)."""


class ShardedStatesProgram(DeepSpeedProgram):
    """One rank whose weights are views of one flat buffer."""

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.partition = job.partition(round_robin=job.options.round_robin_gradients)
        self.buffer = self.partition.buffer
        self.slices = dict(self.partition.kind.slices)
        """Elements of each parameter inside this rank's part."""
        self.stage2 = job.given.setup.zero_stage is ZeroStage.GRADIENTS
        self.element_bytes = job.weight_bytes if self.stage2 else job.gradient_bytes
        self.while_backward = self.stage2 or job.options.overlap_comm
        self.buckets: list[Block] = []
        self.waiting: list[int] = []
        """Parameters whose gradients are in the bucket."""
        self.filled = 0
        self.large: list[Block] = []
        """Gradients larger than the bucket, in their own memory."""
        self.stale: list[Block] = []
        """Such gradients that stage 1 lets go with the epilogue."""
        self.owned: Block | None = None
        """This rank's gradients of this backward pass."""
        self.accumulated: Block | None = None
        """Those of earlier micro-steps."""

    # -- loading ---------------------------------------------------------------------------------

    def load(self) -> None:
        """The weights are flattened, then this rank's part becomes master weights."""
        job, ledger = self.job, self.ledger
        loaded = self.load_weights()
        self.load_buffers()
        ledger.empty_cache()
        self.allocate(job.weight_bytes * self.partition.numel)
        for weight, block in loaded.items():
            if weight[0].requires_grad:
                ledger.free(block)
        if job.offloads_optimizer:
            self.allocate(job.largest_bytes)
            return
        part = self.partition.size
        clone = self.allocate(job.weight_bytes * part)
        self.allocate(MASTER_BYTES * part)
        ledger.free(clone)
        zeros = self.allocate(MASTER_BYTES * part)
        ledger.free(zeros)

    # -- backward --------------------------------------------------------------------------------

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """Into the bucket at once, or beside the others until all are there."""
        if not self.buckets:
            size = self.job.options.reduce_bucket_size * self.element_bytes
            count = 2 if self.job.options.overlap_comm else 1
            self.buckets = [self.allocate(size) for _ in range(count)]
        if not self.while_backward:
            super().gradient_ready(weight, block)
            return
        self._add(self.number(weight), block)

    def _add(self, index: int, block: Block) -> None:
        """Take a gradient, reducing what is there where it does not fit in."""
        numel = self.buffer.numels[index]
        bucket_numel = self.job.options.reduce_bucket_size
        if self.filled + numel > bucket_numel:
            self._reduce()
        if numel > bucket_numel:
            self.large.append(block)
        else:
            self.ledger.free(block)
        self.waiting.append(index)
        self.filled += numel

    def _reduce(self) -> None:
        """All-reduce through a flat copy; this rank's gradients move into their buffer."""
        if not self.waiting:
            return
        job, ledger, partition = self.job, self.ledger, self.partition
        copy = self._flat_copy_numel() * self.element_bytes
        if copy:
            # With overlap_comm it is made on the stream of the reduction.
            stream = 1 if job.options.overlap_comm else 0
            size = round_up(copy, ALLOCATION_ROUNDING)
            ledger.free(ledger.allocate(size, stream))
        slices = [self.slices.get(index, 0) for index in self.waiting]
        largest = max(slices, default=0)
        if job.offloads_optimizer:
            for numel in slices:
                if numel:
                    ledger.free(self.allocate(NORM_BYTES * numel))
        elif largest and self.owned is None:
            self.owned = self.allocate(job.weight_bytes * partition.whole_numel)
        if self.stage2 or largest:
            for block in self.large:
                ledger.free(block)
        else:
            self.stale += self.large
        self.large = []
        self.waiting = []
        self.filled = 0

    def _flat_copy_numel(self) -> int:
        """Elements of the flat copy: flattening one tensor is no copy."""
        buffer, waiting = self.buffer, self.waiting
        ranks = {buffer.first_rank[index] for index in waiting}
        ranks |= {buffer.last_rank[index] for index in waiting}
        if len(ranks) == 1:
            return 0
        bucket_numel = self.job.options.reduce_bucket_size
        if self.filled <= bucket_numel:
            return self.filled
        largest = filled = count = 0
        for piece in buffer.cuts(waiting[0]):
            filled += piece
            count += 1
            if filled > bucket_numel:
                largest = max(largest, filled if count > 1 else 0)
                filled = count = 0
        return max(largest, filled if count > 1 else 0)

    def end_backward(self) -> None:
        """The epilogue: what waits is reduced, then the buckets go."""
        ledger = self.ledger
        if not self.while_backward:
            if not self.last:
                return
            self._reduce_in_order()
        if self.stage2 or self.last:
            self._reduce()
        self._accumulate()
        for block in self.stale:
            ledger.free(block)
        self.stale = []
        if self.stage2 or self.last:
            for block in self.buckets:
                ledger.free(block)
            self.buckets = []

    def _reduce_in_order(self) -> None:
        """Stage 1: every gradient through the bucket, in the order of the parameters."""
        waiting = {self.number(weight): block for weight, block in self.gradients.items()}
        self.gradients.clear()
        for index in self.buffer.order:
            if index in waiting:
                self._add(index, waiting[index])

    def _accumulate(self) -> None:
        """Stage 2 adds this micro-step's gradients to those of earlier ones."""
        if self.owned is None or not self.stage2:
            return
        if self.accumulated is None:
            self.accumulated, self.owned = self.owned, None
        else:
            self.ledger.free(self.owned)
            self.owned = None

    # -- the update ------------------------------------------------------------------------------

    def optimizer_step(self, *, first: bool) -> None:
        """The norm gradient by gradient, then one flat fp32 gradient, then the update."""
        job, ledger, partition = self.job, self.ledger, self.partition
        if job.offloads_optimizer:
            return
        part = partition.size
        if job.options.check_gradient_norm:
            for numel in self.slices.values():
                if numel:
                    ledger.free(self.allocate(NORM_BYTES * numel))
        flat = None
        if len(partition.owned) > 1:
            flat = self.allocate(job.weight_bytes * part)
        cast = self.allocate(MASTER_BYTES * part)
        if flat is not None:
            ledger.free(flat)
        for block in (self.accumulated, self.owned):
            if block is not None:
                ledger.free(block)
        self.accumulated = self.owned = None
        step_optimizer(
            self.given, ledger, [round_up(MASTER_BYTES * part, ALLOCATION_ROUNDING)], first=first
        )
        ledger.free(cast)
