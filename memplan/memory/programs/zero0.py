"""Stage 0: nothing is sharded (``memplan.memory.deepspeed.stage0`` says which wrapper is which)."""

from memplan.memory.account import ComponentKind
from memplan.memory.deepspeed.job import MASTER_BYTES, Job
from memplan.memory.deepspeed.stage0 import ALLREDUCE_BUCKET, is_flat
from memplan.memory.ledger import Block, Ledger
from memplan.memory.programs.program import Weight, step_optimizer
from memplan.memory.programs.zero import DeepSpeedProgram

_CLONE = "the weights before flattening"
_MASTERS = "an fp32 copy of each trained parameter"
_ZEROS = "fp32 zeros for the step that makes the states"
_OWN_ZEROS = "zeros in the weights' dtype too"
_REDUCED = "the flat copy of a bucket while it is reduced"


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
            clones = [
                self.allocate(self.copied(weight), ComponentKind.TEMPORARIES, _CLONE)
                for weight in trained
            ]
            flat = self.job.trained_bytes
            self.allocate(flat, ComponentKind.PARAMETERS, "the flat buffer")
            self.free_all(clones)
            self.free_all([loaded[weight] for weight in trained])
            self._make_master(flat, self.fp32[0], _MASTERS)
        else:
            for weight, size in zip(trained, self.fp32, strict=True):
                self._make_master(self.copied(weight), size, weight)
        zeros = [self.allocate(size, ComponentKind.GRADIENTS, _ZEROS) for size in self.fp32]
        if not self.is_flat:
            zeros += [
                self.allocate(self.copied(weight), ComponentKind.GRADIENTS, _OWN_ZEROS)
                for weight in trained
            ]
        step_optimizer(self.given, self.ledger, self.fp32, first=True)
        self.free_all(zeros)

    def _make_master(self, num_bytes: int, fp32_bytes: int, name: str | Weight) -> None:
        clone = self.allocate(num_bytes, ComponentKind.TEMPORARIES, _CLONE)
        self.allocate(fp32_bytes, ComponentKind.MASTER_WEIGHTS, name)
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
        cast = job.communication_bytes * sum(bucket) if is_cast else 0
        self.use(flat, cast, kind=ComponentKind.COMMUNICATION_BUFFERS, name=_REDUCED)

    def optimizer_step(self, *, first: bool) -> None:
        """Casts of all gradients, flattened where the masters are."""
        if not self.is_wrapped:
            super().optimizer_step(first=first)
            return
        sizes = [MASTER_BYTES * weight[0].numel for weight in self.trained]
        gradients: list[Block] = [
            self.allocate(size, ComponentKind.TEMPORARIES, "gradients cast to fp32")
            for size in sizes
        ]
        if self.is_flat:
            name = "gradients cast to fp32, then flattened"
            flat = self.allocate(self.fp32[0], ComponentKind.TEMPORARIES, name)
            self.free_all(gradients)
            gradients = [flat]
            self.zero_grad()
        step_optimizer(self.given, self.ledger, self.fp32, first=False)
        self.free_all(gradients)
