"""Stage 0: nothing is sharded (``memplan.memory.deepspeed.stage0`` says which wrapper is which)."""

from memplan.memory.deepspeed.job import MASTER_BYTES, Job
from memplan.memory.deepspeed.stage0 import ALLREDUCE_BUCKET, is_flat
from memplan.memory.ledger import Block, Ledger
from memplan.memory.programs.program import step_optimizer
from memplan.memory.programs.zero import DeepSpeedProgram


class ReplicatedProgram(DeepSpeedProgram):
    """One rank that holds everything; in fp32 the loop is a plain one but for the all-reduce."""

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.is_flat = is_flat(job)
        self.is_wrapped = job.given.formats.master_weights
        numels = [weight[0].numel for weight in self.trained]
        self.fp32 = [MASTER_BYTES * numel for numel in numels]
        """The optimizer's tensors: one, or one for each parameter."""
        if self.is_flat:
            self.fp32 = [MASTER_BYTES * sum(numels)]

    def load(self) -> None:
        """Masters of the weights; a first step over zeros makes the states."""
        loaded = self.load_weights()
        self.load_buffers()
        if not self.is_wrapped:
            return
        trained = self.trained
        if self.is_flat:
            clones = [self.ledger.allocate(self.copied(weight)) for weight in trained]
            flat = self.job.trained_bytes
            self.allocate(flat)
            self.free_all(clones)
            self.free_all([loaded[weight] for weight in trained])
            self._make_master(flat, self.fp32[0])
        else:
            for weight, size in zip(trained, self.fp32, strict=True):
                self._make_master(self.copied(weight), size)
        zeros = [self.allocate(size) for size in self.fp32]
        if not self.is_flat:
            zeros += [self.ledger.allocate(self.copied(weight)) for weight in trained]
        step_optimizer(self.given, self.ledger, self.fp32, first=True)
        self.free_all(zeros)

    def _make_master(self, num_bytes: int, fp32_bytes: int) -> None:
        clone = self.allocate(num_bytes)
        self.allocate(fp32_bytes)
        self.ledger.free(clone)

    def end_backward(self) -> None:
        """All gradients through buckets, flat, and cast where they travel in another dtype."""
        if not self.last:
            return
        bucket: list[int] = []
        for weight in self.trained:
            bucket.append(weight[0].numel)
            if sum(bucket) > ALLREDUCE_BUCKET:
                self._reduce(bucket)
                bucket = []
        if bucket:
            self._reduce(bucket)

    def _reduce(self, bucket: list[int]) -> None:
        job = self.job
        flat = job.weight_bytes * sum(bucket) if len(bucket) > 1 else 0
        is_cast = job.communication_bytes != job.weight_bytes
        self.use(flat, job.communication_bytes * sum(bucket) if is_cast else 0)

    def optimizer_step(self, *, first: bool) -> None:
        """Casts of all gradients, flattened where the masters are."""
        if not self.is_wrapped:
            super().optimizer_step(first=first)
            return
        sizes = [MASTER_BYTES * weight[0].numel for weight in self.trained]
        gradients: list[Block] = [self.allocate(size) for size in sizes]
        if self.is_flat:
            flat = self.allocate(self.fp32[0])
            self.free_all(gradients)
            gradients = [flat]
            self.zero_grad()
        step_optimizer(self.given, self.ledger, self.fp32, first=False)
        self.free_all(gradients)
