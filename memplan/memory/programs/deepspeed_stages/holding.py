"""What a rank of stage 3 holds: shards, and how they come to be (DeepSpeed 0.19.8, runtime/zero/stage3.py, ``__init__``)."""

from collections.abc import Sequence
from functools import cached_property

from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.deepspeed.host import sharded_host
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.modules import find_stops
from memplan.memory.deepspeed.shards import fetch_settings, shard_plan
from memplan.memory.programs.deepspeed_stages.gathering import PlayedCoordinator
from memplan.memory.programs.deepspeed_stages.zero import SCALED_LOSSES, DeepSpeedProgram
from memplan.memory.programs.weights import Weight
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.splitting.exchange import Ranks

GATHER_STREAM, REDUCE_STREAM = 1, 2
_BUFFERS, _GATHERED = ComponentKind.COMMUNICATION_BUFFERS, ComponentKind.GATHERED_PARAMETERS
_GRADIENTS, _TEMPORARIES = ComponentKind.GRADIENTS, ComponentKind.TEMPORARIES
SHARDS = "the shards"
_DESCRIBED = 7
"""Blocks that are there at once, of a matrix whose corners are gathered: recorded on PyTorch's CUDA build."""


class HoldingShards(DeepSpeedProgram):
    """One rank of stage 3, between its passes."""

    scaled_losses = SCALED_LOSSES

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.plan = shard_plan(job)
        self.numels, self.shards = job.weights.numels, self.plan.shards
        self.order = sorted(self.weights, key=self.number)
        """Weights as the model declares them."""
        self.persistent = [
            self.number(weight) for weight in self.order if weight[0] in self.plan.persistent
        ]
        fetching = fetch_settings(job)
        self.gathers = fetching.gathers
        self.coordinator = PlayedCoordinator(
            fetching,
            self.numels,
            ledger,
            stream=GATHER_STREAM if job.options.overlap_comm else 0,
            persistent=frozenset(self.persistent),
            sealed=find_stops(job.given.tape).delayed,
        )
        if job.options.hpz_partition_size > 1 and not job.offloads_param:
            self.coordinator.second_shard = self._second_shard
            self.coordinator.second_ranks = Ranks(job.options.hpz_partition_size)

    def load(self) -> None:
        """The model is sharded, the shards laid out flat; then masters, the bucket and gradients."""
        job, ledger, plan = self.job, self.ledger, self.plan
        trained = [weight for weight in self.order if weight[0].requires_grad]
        shards = self._load_shards()
        if not job.offloads_optimizer:
            self.allocate(ALLOCATION_ROUNDING, _BUFFERS, "whether a gradient overflowed")
        if not job.offloads_param:
            for weight in trained:
                ledger.free(shards[weight])
            ledger.empty_cache()
            flat = job.weight_bytes * plan.total
            self.allocate(flat, ComponentKind.PARAMETERS, "this rank's shards")
        if not job.offloads_optimizer:
            self._make_masters()
        if plan.bucket_bytes:
            self.allocate(plan.bucket_bytes, _BUFFERS, "the reduce bucket, allocated once")
        if not job.offloads_optimizer:
            size, name = job.gradient_bytes * plan.total, "one for each shard, allocated once"
            self.allocate(size, _GRADIENTS, name)
        self._hang_hooks([job.weight_bytes * self.shards[self.number(each)] for each in trained])

    def _hang_hooks(self, shards: Sequence[int]) -> None:
        """A parameter is gathered to hang a hook on it, on one rank too."""
        ranks, name = self.job.num_ranks, "a parameter gathered to hang a hook on it"
        if not self.job.offloads_param:
            whole = (rounded(shard * ranks) for shard in shards)
            self.ledger.use_in_turn(whole, kind=_GATHERED, name=name)
            return
        for shard in shards:
            gathered = self.allocate(shard * ranks, _GATHERED, name)
            self.use(shard, kind=_BUFFERS, name="shards from the CPU")
            self.ledger.free(gathered)

    def _load_shards(self) -> dict[Weight, Block]:
        """The whole model at once, or with zero.Init module by module, cut parameter by parameter."""
        shards: dict[Weight, Block] = {}
        if not self.job.options.zero_init:
            whole = self.load_model()
            self._describe_arguments()
            for weight in self.order:
                self._cut(weight, whole[weight], shards)
            return shards
        modules: dict[tuple[str, int, int], list[Weight]] = {}
        for weight in self.order:
            parameter, copy = weight
            key = (parameter.module, copy, self.job.weights.owners[parameter] - self._place(weight))
            modules.setdefault(key, []).append(weight)
        for weights in modules.values():
            blocks = [
                self.ledger.allocate(
                    weight[0].storage.num_bytes, 0, ComponentKind.PARAMETERS, weight
                )
                for weight in weights
            ]
            for weight, block in zip(weights, blocks, strict=True):
                self._cut(weight, block, shards)
        self.tables.load_all()
        return shards

    def _describe_arguments(self) -> None:
        """``__init__`` puts its arguments into words that nobody reads (``locals()``), the first and last elements of
        each weight among them: one after another, in so many blocks (torch/_tensor_str.py)."""
        self.use(
            *(ALLOCATION_ROUNDING,) * _DESCRIBED, kind=_TEMPORARIES, name="a weight put into words"
        )

    def _place(self, weight: Weight) -> int:
        """Its position within its segment."""
        return self._places[weight[0]]

    @cached_property
    def _places(self) -> dict[Parameter, int]:
        """The same of all parameters, each within the first segment that has it."""
        found: dict[Parameter, int] = {}
        for own in reversed(self.job.weights.segments):
            found.update(own.positions)
        return found

    def _cut(self, weight: Weight, whole: Block, shards: dict[Weight, Block]) -> None:
        self.coordinator.cut_second(self.number(weight))
        if not self.job.offloads_param:
            shard = self.shards[self.number(weight)]
            size = self.job.weight_bytes * shard
            shards[weight] = self.allocate(size, ComponentKind.PARAMETERS, weight)
        self.ledger.free(whole)

    def _second_shard(self, number: int) -> Block:
        """Of the second set, which as many ranks share as ``zero_hpz_partition_size`` says."""
        job = self.job
        numel = self.shards[number] * job.num_ranks // job.options.hpz_partition_size
        name = "a second set of shards (zero_hpz_partition_size)"
        return self.allocate(job.weight_bytes * numel, ComponentKind.PARAMETERS, name)

    def _make_masters(self) -> None:
        """Each sub-group is cast and cloned; the variable of the cast is only then set anew.

        Of weights that are fp32 there is a clone too: what would leave it out (``_create_fp32_partitions``) compares
        a ``torch.device`` with its name, which are never equal.
        """
        job, ledger = self.job, self.ledger
        masters = f"{job.master_name}, of the same shards"
        is_cast = job.weight_bytes != job.master_bytes
        cast: Block | None = None
        for group in self.plan.groups:
            size = job.master_bytes * group
            if is_cast:
                before, cast = cast, self.allocate(size, _TEMPORARIES, "a sub-group cast")
                if before is not None:
                    ledger.free(before)
            self.allocate(size, ComponentKind.MASTER_WEIGHTS, masters)
        if cast is not None:
            ledger.free(cast)
        largest = job.master_bytes * max(self.plan.groups, default=0)
        zeros = f"{job.master_name} zeros of the largest sub-group"
        gradient = self.allocate(largest, _GRADIENTS, zeros)
        self.make_over_masters(self.plan.groups, of=SHARDS)
        ledger.free(gradient)

    def save(self) -> None:
        """Module by module gathered, while the 16-bit model is put together on rank 0."""
        if not self.job.options.gather_16bit_weights_on_model_save:
            return
        largest = 0
        for segment in self.given.tape.segments:
            modules: dict[str, list[int]] = {}
            for each in segment.parameters:
                modules.setdefault(each.module, []).append(each.storage.num_bytes)
            for sizes in modules.values():
                copies = 2 if len(sizes) > 1 and self.job.num_ranks > 1 else 1
                largest = max(largest, copies * sum(sizes))
        self.use(largest, kind=_GATHERED, name="one module at a time, on its way to rank 0's CPU")

    def host_memory(self) -> HostMemory:
        """The model while it is loaded, what is offloaded, and a checkpoint on its way."""
        return sharded_host(self.job, shards=self.plan.shards, groups=self.plan.groups)
