"""Stage 1 with fp32 accumulation in bf16: ``BF16_Optimizer`` (runtime/bf16_optimizer.py)."""

from memplan.memory.deepspeed.job import MASTER_BYTES, Job, rounded
from memplan.memory.ledger import Block, Ledger
from memplan.memory.programs.program import Weight, step_optimizer
from memplan.memory.programs.zero import DeepSpeedProgram


class Bf16OptimizerProgram(DeepSpeedProgram):
    """One rank whose gradients are kept whole, in fp32 and one flat buffer."""

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.partition = job.partition(round_robin=False)

    def load(self) -> None:
        """The weights are flattened; then this rank's masters and all fp32 gradients."""
        job, partition = self.job, self.partition
        loaded = self.load_weights()
        self.load_buffers()
        self.allocate(job.weight_bytes * partition.numel)
        self.free_all([loaded[weight] for weight in self.trained])
        clone = self.allocate(job.weight_bytes * partition.size)
        self.allocate(MASTER_BYTES * partition.size)
        self.ledger.free(clone)
        self.allocate(MASTER_BYTES * partition.numel)

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """It stays for the end of backward, or is cast and added at once."""
        super().gradient_ready(weight, block)
        if self.job.options.immediate_grad_update:
            self.use(MASTER_BYTES * weight[0].numel)
            self.ledger.free(self.gradients.pop(weight))

    def end_backward(self) -> None:
        """Each gradient is cast and added; then all are summed over the ranks, cast at once."""
        job = self.job
        for weight in self.trained:
            if weight in self.gradients:
                self.use(MASTER_BYTES * weight[0].numel)
        if self.last and job.communication_bytes != MASTER_BYTES:
            self.use(job.communication_bytes * self.partition.numel)

    def optimizer_step(self, *, first: bool) -> None:
        """This rank's part of the gradients is a view of the buffer."""
        size = rounded(MASTER_BYTES * self.partition.size)
        step_optimizer(self.given, self.ledger, [size], first=first)
