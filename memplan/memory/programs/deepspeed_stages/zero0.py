"""Stage 0: nothing is sharded, and the wrapper is one of two, for fp16 and bf16 alike.

Legend: W bytes of a weight, Φ trained parameters. Held by both: WΦ weights, 4Φ master weights and
the optimizer's states, which are made at once. After backward the gradients are all-reduced through
a copy of at most 5e8 elements and one parameter more (engine.py, ``buffered_allreduce_fallback``),
which is cast where gradients travel in another dtype; the bucket sizes of ``zero_optimization`` have
no part in it.

DeepSpeed's own FusedAdam gets ``FP16_Optimizer`` (runtime/fp16/fused_optimizer.py), with everything
flat: the step casts every gradient to fp32 and then flattens the casts, with the gradients still
there. Any other optimizer, among them PyTorch's AdamW, which HF Trainer brings where the file has no
optimizer section, gets ``FP16_UnfusedOptimizer`` (runtime/fp16/unfused_optimizer.py): each parameter
has a master weight of its own, the step casts each gradient to fp32 (4Φ) and updates, and the first
step at start-up has zero gradients in both dtypes. In fp32 there is no wrapper: parameters and
gradients are the optimizer's own.
"""

from memplan.memory.account import ComponentKind
from memplan.memory.deepspeed.job import MASTER_BYTES, Job
from memplan.memory.programs.deepspeed_stages.zero import DeepSpeedProgram
from memplan.memory.programs.updating import Updating
from memplan.memory.programs.weights import Weight
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.splitting.exchange import ExchangeKind

ALLREDUCE_BUCKET = 500_000_000
"""Elements of the engine's own bucket; a constant of engine.py."""
_CLONE = "the weights before flattening"
_MASTERS = "an fp32 copy of each trained parameter"
_ZEROS = "fp32 zeros for the step that makes the states"
_OWN_ZEROS = "zeros in the weights' dtype too"
_PARAMETER = "every trained parameter"
_REDUCED = "the flat copy of a bucket while it is reduced"


class ReplicatedProgram(DeepSpeedProgram):
    """One rank that holds everything; in fp32 the loop is a plain one but for the all-reduce."""

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.is_flat = job.is_flat
        self.is_wrapped = job.given.formats.master_weights
        numels = [weight[0].numel for weight in self.trained]
        self.stepped = [sum(numels)] if self.is_flat else numels
        """Elements of the optimizer's tensors: one, or one for each parameter."""
        self.fp32 = [MASTER_BYTES * numel for numel in self.stepped]

    def load(self) -> None:
        """Masters of the weights; a first step over zeros makes the states."""
        loaded = self.load_model()
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
        self.step_masters(self.stepped, of=_PARAMETER, first=True)
        self.free_all(zeros)

    def make_optimizer(self) -> None:
        """In fp32 it steps the parameters themselves."""
        if not self.is_wrapped:
            Updating.make_optimizer(self)

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
        sent = job.communication_bytes * sum(bucket)
        self.ledger.exchange(ExchangeKind.COPY, 2 * flat + 2 * cast)
        self.ledger.exchange(ExchangeKind.ALL_REDUCE, sent, self.ranks)
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
        self.step_masters(self.stepped, of=_PARAMETER, first=False)
        self.free_all(gradients)
