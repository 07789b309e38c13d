"""Stage 1 with fp32 accumulation in bf16, and bf16 pipelines without ZeRO: ``BF16_Optimizer``
(runtime/bf16_optimizer.py).

Legend: Φ trained parameters, P one rank's part, n the largest parameter. The engine takes this
wrapper in place of ZeRO's where ``grad_accum_dtype`` is fp32 and nothing is offloaded. Held: 2Φ
weights, 4Φ fp32 gradients that are never let go, 4P master weights and the states. Backward leaves
2Φ bf16 gradients; each is then cast to fp32 and added (4n), and all fp32 gradients are cast at once
to the dtype in which they are summed over the ranks (2Φ; none where that is fp32). A pipeline without
ZeRO keeps bf16 gradients (2Φ), to which others are added as they are; its step casts 4P of them.
"""

from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.deepspeed.job import MASTER_BYTES, Job
from memplan.memory.programs.deepspeed_stages.zero import DeepSpeedProgram
from memplan.memory.programs.weights import Weight
from memplan.memory.replaying.ledger import Block, Ledger

_CAST = "all gradients, cast to be summed over the ranks"


class Bf16OptimizerProgram(DeepSpeedProgram):
    """One rank whose gradients are kept whole, in fp32 and one flat buffer."""

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.partition = job.partition(round_robin=False)

    def load(self) -> None:
        """The weights are flattened; then this rank's masters and all fp32 gradients."""
        job, partition = self.job, self.partition
        loaded = self.load_model()
        flat = job.weight_bytes * partition.numel
        self.allocate(flat, ComponentKind.PARAMETERS, "the flat buffer")
        self.free_all([loaded[weight] for weight in self.trained])
        own = "this rank's part before it is cast"
        clone = self.allocate(job.weight_bytes * partition.size, ComponentKind.TEMPORARIES, own)
        part, name = MASTER_BYTES * partition.size, "fp32, this rank's part"
        self.allocate(part, ComponentKind.MASTER_WEIGHTS, name)
        self.ledger.free(clone)
        name = "one for each parameter, kept between steps"
        self.allocate(job.gradient_bytes * partition.numel, ComponentKind.GRADIENTS, name)

    def host_memory(self) -> HostMemory:
        """The model while it is loaded, and a checkpoint on its way."""
        return self.replicated_memory(part_numel=self.partition.size)

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """It stays for the end of backward, or is cast and added at once."""
        super().gradient_ready(weight, block)
        if self.job.options.immediate_grad_update:
            self._add(weight)
            self.ledger.free(self.gradients.pop(weight))

    def end_backward(self) -> None:
        """Each gradient is cast and added; then all are summed over the ranks, cast at once."""
        job = self.job
        for weight in self.trained:
            if weight in self.gradients:
                self._add(weight)
        if self.last and job.communication_bytes != job.gradient_bytes:
            size = job.communication_bytes * self.partition.numel
            self.use(size, kind=ComponentKind.COMMUNICATION_BUFFERS, name=_CAST)

    def _add(self, weight: Weight) -> None:
        """Cast a gradient to fp32, to be added to what is kept."""
        if self.job.gradient_bytes == self.job.weight_bytes:
            return  # Added as it is.
        size = MASTER_BYTES * weight[0].numel
        self.use(size, kind=ComponentKind.TEMPORARIES, name="a gradient cast to fp32")

    def optimizer_step(self, *, first: bool) -> None:
        """This rank's part of the gradients is a view of the buffer, or a cast of that."""
        cast: list[Block] = []
        if self.job.gradient_bytes != MASTER_BYTES:
            copied = self.copied_weights
            measured = (each for each in self.trained if self.number(each) not in copied)
            sizes = (MASTER_BYTES * weight[0].numel for weight in measured)
            self.use_in_turn(sizes, name="a gradient in fp32, for its norm")
            size = MASTER_BYTES * self.partition.size
            cast = [self.allocate(size, ComponentKind.TEMPORARIES, "this rank's gradients in fp32")]
        self.step_masters([self.partition.size], of="this rank's part", first=first)
        self.free_all(cast)
