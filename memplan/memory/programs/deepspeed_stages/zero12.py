"""Stages 1 and 2 of ZeRO (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py)."""

from memplan.dtypes import DType
from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.deepspeed.host import replicated_host, saved_bytes, writer_bytes
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.reduction import (
    COMPACT_BYTES,
    NORM_BYTES,
    flattens_on_gpu,
    reduction_settings,
)
from memplan.memory.programs.deepspeed_stages.zero import SCALED_LOSSES, DeepSpeedProgram
from memplan.memory.programs.weights import Weight, weights_of
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.model.parameters import ModelPart
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.kernels import LossKernel
from memplan.training.splitting.exchange import ExchangeKind, Hiding

REDUCE_STREAM = 1
_BUFFERS, _GRADIENTS = ComponentKind.COMMUNICATION_BUFFERS, ComponentKind.GRADIENTS
_TEMPORARIES = ComponentKind.TEMPORARIES
_PART = "this rank's part"
_KEPT = "kept by this rank"
_FLAT_COPY = "the flat copy of a bucket while it is reduced"
_NORM = "a gradient in fp32, for its norm"


class ShardedStatesProgram(DeepSpeedProgram):
    """One rank whose weights are views of one flat buffer."""

    scaled_losses = SCALED_LOSSES

    is_even = False

    def __init__(self, job: Job, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(job, ledger, workspace_bytes=workspace_bytes)
        self.partition = job.partition(round_robin=job.options.round_robin_gradients)
        self.buffer = self.partition.buffer
        self.slices = dict(self.partition.kind.slices)
        """Elements of each parameter inside this rank's part."""
        self.stage2 = job.given.setup.zero_stage is ZeroStage.GRADIENTS
        self.settings = reduction_settings(job, self.partition)
        self.loss = job.given.tape.kernels.loss
        self.while_backward = self.stage2 or job.options.overlap_comm
        self.stream = REDUCE_STREAM if job.options.overlap_comm else 0
        """Where a bucket is reduced, and this rank's gradients taken out of it (``reduce_ipg_grads``)."""
        self.buckets: list[Block] = []
        self.waiting: list[int] = []
        """Parameters whose gradients are in the bucket."""
        self.filled = 0
        self.large: list[Block] = []
        """Gradients larger than the bucket, in their own memory."""
        self.stale: list[Block] = []
        """Reduced gradients, and buckets they are views of, that are let go later."""
        self.bucket = 0
        """The number of the bucket that is filled."""
        self.viewed: set[int] = set()
        """Buckets that other ranks' gradients are views of."""
        self.owned: Block | None = None
        """This rank's gradients of this backward pass."""
        self.accumulated: Block | None = None
        """Those of earlier micro-steps."""
        self.zeros: list[Block] = []
        """What stands for gradients that never come."""

    # -- loading ---------------------------------------------------------------------------------

    def load(self) -> None:
        """The weights are flattened, then this rank's part becomes master weights."""
        job, ledger = self.job, self.ledger
        loaded = self.load_model()
        whole = [block for weight, block in loaded.items() if weight[0].requires_grad]
        ledger.empty_cache()
        if not flattens_on_gpu(job, self.partition.numel):
            whole = self._move_to_cpu(whole)
        flat = job.weight_bytes * self.partition.numel
        self.allocate(flat, ComponentKind.PARAMETERS, "the flat buffer")
        self.free_all(whole)
        if job.offloads_optimizer:
            staging = "a staging buffer of the largest parameter's size"
            self.allocate(job.largest_bytes, _BUFFERS, staging)
            return
        self._make_masters()

    def _move_to_cpu(self, whole: list[Block]) -> list[Block]:
        """Each weight goes to the CPU, to be flattened there; a single element stays in its place."""
        left = []
        for block in whole:
            name = "in the place of a weight that is on the CPU"
            left.append(self.allocate(ALLOCATION_ROUNDING, _TEMPORARIES, name))
            self.ledger.free(block)
        self.ledger.empty_cache()
        return left

    def _make_masters(self) -> None:
        """A clone of this rank's part, which fp32 masters keep; a first gradient of zeros."""
        job, part = self.job, self.partition.size
        masters = f"{job.master_name}, this rank's part of the flat buffer"
        if job.weight_bytes == job.master_bytes:
            self.allocate(job.master_bytes * part, ComponentKind.MASTER_WEIGHTS, masters)
        else:
            clone = "this rank's part before it is cast"
            cloned = self.allocate(job.weight_bytes * part, _TEMPORARIES, clone)
            self.allocate(job.master_bytes * part, ComponentKind.MASTER_WEIGHTS, masters)
            self.ledger.free(cloned)
        zeros = f"{job.master_name} zeros, for a moment"
        gradient = self.allocate(job.master_bytes * part, _GRADIENTS, zeros)
        self.make_over_masters([part], of=_PART)
        self.ledger.free(gradient)

    def host_memory(self) -> HostMemory:
        """The model while it is loaded, what is offloaded, and a checkpoint on its way."""
        job, part = self.job, self.partition.size
        if not job.offloads_optimizer:
            # Where it is flattened on the CPU there is a copy of it beside the flat buffer.
            copies = 1 if flattens_on_gpu(job, self.partition.numel) else 2
            return HostMemory(
                load_bytes=copies * job.model_bytes,
                save_bytes=saved_bytes(job, part_numel=part),
                writer_bytes=writer_bytes(job, part_numel=part),
            )
        accumulated = 0
        if job.accumulates and self.stage2 and not self.settings.compact:
            accumulated = job.weight_bytes * self.partition.whole_numel
        return replicated_host(job, part_numel=part, accumulated_bytes=accumulated)

    # -- backward --------------------------------------------------------------------------------

    def before_forward(self, segment: Segment, repetition: int) -> None:  # noqa: ARG002
        """A loss that runs backward tile by tile within the forward pass makes gradients there."""
        if self.loss is LossKernel.TILED_GRADIENTS and is_cut(segment):
            self._make_buckets()

    def before_backward(self, segment: Segment, repetition: int) -> None:  # noqa: ARG002
        """The first tile's gradient asks for the bucket, that of the last one fills it."""
        if self.loss is LossKernel.TILED and is_cut(segment):
            self._make_buckets()

    def _make_buckets(self) -> None:
        """``setup_buckets``, in the hook of the first gradient."""
        settings = self.settings
        if not self.buckets:
            self.buckets = [
                self.ledger.allocate(settings.bucket_bytes, 0, _BUFFERS, "reduce bucket")
                for _ in range(settings.num_buckets)
            ]

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """Into the bucket at once, or beside the others until all are there."""
        settings = self.settings
        if not self.buckets:
            self._make_buckets()
        if settings.casts:
            cast = self.allocate(settings.element_bytes * weight[0].numel, _GRADIENTS, weight)
            self.ledger.free(block)
            block = cast
        if not self.while_backward or not (self.stage2 or self.last):
            super().gradient_ready(weight, block)
            return
        earlier = self.gradients.pop(weight, None) if self.gradients else None
        if earlier is not None:
            self.ledger.free(block)
            block = earlier
        self._add(self.number(weight), block)

    def _add(self, index: int, block: Block) -> None:
        """Take a gradient, reducing what is there where it does not fit in."""
        numel, ledger = self.buffer.numels[index], self.ledger
        ledger.exchange(ExchangeKind.COPY, 2 * self.settings.element_bytes * numel)
        bucket_numel = self.settings.bucket_numel
        if self.filled + numel > bucket_numel:
            self._reduce()
            self.bucket = (self.bucket + 1) % self.settings.num_buckets
        if numel > bucket_numel:
            if self.settings.offloads:
                # A clone of its own, since the copy to the CPU may still run when autograd goes on.
                size = self.settings.element_bytes * numel
                clone = self.allocate(size, _GRADIENTS, "a copy on its way to the CPU")
                ledger.free(block)
                block = clone
            self.large.append(block)
        else:
            ledger.free(block)
        self.waiting.append(index)
        self.filled += numel

    def _reduce(self) -> None:
        """All-reduce through copies; this rank's gradients move into their buffer."""
        if not self.waiting:
            return
        settings = self.settings
        slices = [self.slices[index] for index in self.waiting if self.slices.get(index)]
        if settings.compact and slices and self.owned is None:
            size = settings.owned_part_bytes
            self.owned = self.allocate(size, _GRADIENTS, _KEPT, stream=self.stream)
        self._sum_over_ranks(slices)
        if settings.offloads:
            self._send_to_host(sum(slices))
            norms = (NORM_BYTES * numel for numel in slices)
            self.use_in_turn(norms, name=_NORM, stream=self.stream)
        elif slices and self.owned is None:
            size = settings.owned_element_bytes * self.partition.whole_numel
            self.owned = self.allocate(size, _GRADIENTS, _KEPT, stream=self.stream)
        self._let_go(is_own=bool(slices))
        self.waiting = []
        self.filled = 0

    def _send_to_host(self, numel: int) -> None:
        """Gradients of earlier micro-batches come back to be added to; the last one's go as fp32 masters need them
        (``async_accumulate_grad_in_cpu_via_gpu``, ``async_inplace_copy_grad_to_fp32_buffer_from_gpu``).

        A bucket lies in one rank's part, or two: this one copies while all wait for it in the next reduction, unless
        ``round_robin_gradients`` deals parameters out (DeepSpeed #1067: "gradient copying to CPU occurs one rank at a time").
        """
        to_gpu, to_host = ExchangeKind.TO_GPU, ExchangeKind.TO_HOST
        if not self.job.options.round_robin_gradients and self.buffer.num_ranks > 1:
            numel = self.buffer.largest_share(self.waiting)
            to_gpu, to_host = ExchangeKind.TO_GPU_IN_TURN, ExchangeKind.TO_HOST_IN_TURN
        kept = self.settings.element_bytes * numel
        if self.adds and self.stage2:
            self.ledger.exchange(to_gpu, kept, hiding=self.hiding)
        sent = max(kept, DType.FP32.num_bytes * numel) if self.last else kept
        self.ledger.exchange(to_host, sent, hiding=self.hiding)

    def _sum_over_ranks(self, slices: list[int]) -> None:
        """Piece by piece through a flat copy, and a cast where they travel in another dtype."""
        settings, ledger = self.settings, self.ledger
        stream = self.stream
        is_cast = settings.communication_bytes != settings.element_bytes
        for numel, is_copied in self._pieces():
            sent = settings.communication_bytes * numel
            ledger.exchange(ExchangeKind.ALL_REDUCE, sent, self.ranks, self.hiding)
            if is_copied and settings.scatters:
                # Flattened, and copied back when it is reduced.
                ledger.exchange(ExchangeKind.COPY, 4 * settings.element_bytes * numel)
            copies = []
            if is_copied and settings.scatters:
                size = settings.element_bytes * numel
                copies.append(self.allocate(size, _BUFFERS, _FLAT_COPY, stream=stream))
            if is_cast:
                size, name = settings.communication_bytes * numel, "a bucket cast to be reduced"
                copies.append(self.allocate(size, _BUFFERS, name, stream=stream))
                self.free_all(copies[:-1])
                copies = copies[-1:]
            if settings.compact and settings.communication_bytes != COMPACT_BYTES:
                name = "reduced gradients cast to be added"
                self.use_in_turn((COMPACT_BYTES * own for own in slices), name=name, stream=stream)
            for block in copies:
                ledger.free(block)

    def _pieces(self) -> list[tuple[int, bool]]:
        """What is summed at once: elements, and whether they are more than one slice."""
        buffer, waiting, limit = self.buffer, self.waiting, self.settings.bucket_numel
        if self.filled <= limit:
            ranks = {buffer.first_rank[index] for index in waiting}
            ranks |= {buffer.last_rank[index] for index in waiting}
            is_apart = self.settings.compact and ranks == {self.job.rank} and len(waiting) > 1
            return [(self.filled, len(ranks) > 1 or is_apart)]
        return buffer.sums(waiting[0], limit)

    def _let_go(self, *, is_own: bool) -> None:
        """Gradients that no name holds any more; others stay stale, or views of their bucket."""
        settings = self.settings
        stays = settings.compact and not settings.offloads if self.stage2 else True
        if self.large and is_own == self.stage2 and stays:
            self.stale += self.large
            self.large = []
        elif not self.large and settings.casts:
            kinds = (self.buffer.first_rank, self.buffer.last_rank)
            own = {kind[index] for kind in kinds for index in self.waiting} == {self.job.rank}
            if not own:
                self.viewed.add(self.bucket)
        self.free_all(self.large)

    def end_backward(self) -> None:
        """The epilogue: what waits is reduced, then the buckets go."""
        if not self.while_backward:
            if not self.last:
                return
            self._reduce_in_order()
        if self.stage2 or self.last:
            self._reduce()
            self._fill_in()
        self._accumulate()
        if not self.settings.casts:
            self.free_all(self.stale)
        if self.stage2 or self.last:
            kept = [block for number, block in enumerate(self.buckets) if number in self.viewed]
            gone = (each for number, each in enumerate(self.buckets) if number not in self.viewed)
            self.free_all(list(gone))
            self.stale += kept
            self.viewed.clear()
            self.buckets = []

    def _reduce_in_order(self) -> None:
        """Stage 1: every gradient through the bucket, in the order of the parameters."""
        waiting = {self.number(weight): block for weight, block in self.gradients.items()}
        self.gradients.clear()
        for index in self.buffer.order:
            if index in waiting:
                self._add(index, waiting[index])

    def _fill_in(self) -> None:
        """Zeros for each parameter of this rank's that no pass has read (``get_all_grad_tensors``), whole."""
        if self.settings.offloads or self.settings.compact:
            return
        absent = (
            each.numel
            for number, (each, _) in enumerate(weights_of(self.job.given.tape))
            if each.unused and number in self.slices
        )
        element_bytes, name = self.settings.owned_element_bytes, "zeros: no gradient came"
        zeros = [self.allocate(element_bytes * numel, _GRADIENTS, name) for numel in absent]
        if self.zeros:  # added to those of an earlier micro-step
            self.free_all(zeros)
        self.zeros = self.zeros or zeros

    def _accumulate(self) -> None:
        """Stage 2 adds this micro-step's gradients to those of earlier ones."""
        if self.owned is None or not self.stage2 or self.settings.compact:
            return
        if self.accumulated is None:
            self.accumulated, self.owned = self.owned, None
        else:
            self.ledger.free(self.owned)
            self.owned = None

    def reduce_gradients(self) -> None:
        """One bucket more is made, and nothing ever put into it (``reduce_gradients(pipeline_parallel=True)``)."""
        extra: list[Block] = []
        if self.job.options.contiguous_gradients:
            size = self.job.communication_bytes * self.settings.bucket_numel
            extra = [self.allocate(size, _BUFFERS, "a reduce bucket that stays empty")]
        super().reduce_gradients()
        self.free_all(extra)

    # -- the update ------------------------------------------------------------------------------

    def optimizer_step(self, *, first: bool) -> None:
        """The norm gradient by gradient, then one flat fp32 gradient, then the update."""
        job, ledger, partition = self.job, self.ledger, self.partition
        kept = (*self.zeros, self.accumulated, self.owned)
        owned = [block for block in kept if block is not None]
        self.accumulated, self.owned, self.zeros = None, None, []
        size = partition.size
        if job.offloads_optimizer:
            self.free_all(self.stale)
            self.free_all(owned)
            self.step_on_host(size)
            # Cast on the CPU into a pinned buffer (``param_buffer_of_bit16_for_cpu_offload_groups`` in ``step``).
            interval = job.options.zenflow_interval
            kind = (
                ExchangeKind.TO_GPU if interval == 1 else ExchangeKind.TO_GPU_PAGEABLE
            )  # from another process
            ledger.exchange(kind, job.weight_bytes * size // interval)
            self._gather_weights()
            return
        # Gradients flattened and cast; masters copied into weights.
        ledger.exchange(ExchangeKind.COPY, size * 2 * (job.weight_bytes + job.master_bytes))
        part = rounded(job.master_bytes * partition.size)
        norms: list[Block] = []
        if job.options.check_gradient_norm:
            copied = self.copied_weights
            slices = [numel for index, numel in partition.kind.slices if index not in copied]
            of_group = self.norm_of(slices, name=_NORM)
            norms = [self.norm_of_all(name=_NORM)]
            ledger.free(of_group)
            norms += self.keep_norm()
        self.free_all(self.stale)
        gradient: list[Block] = []
        if not self.settings.compact:
            if len(partition.owned) > 1:
                size, name = job.weight_bytes * partition.size, "this rank's gradients, flattened"
                gradient = [self.allocate(size, _TEMPORARIES, name)]
            if job.weight_bytes != job.master_bytes:
                name = f"this rank's gradients, cast to {job.master_name}"
                cast = ledger.allocate(part, 0, _TEMPORARIES, name)
                self.free_all(gradient)
                gradient = [cast]
            if (
                gradient
            ):  # else they are one tensor of the masters' format: what is stepped is a view of it
                self.free_all(owned)
        self.step_masters([partition.size], of=_PART, first=first)
        self.free_all([*gradient, *owned])
        self._gather_weights()
        self.free_all(norms)

    def _gather_weights(self) -> None:
        """Every rank's part of the new weights (runtime/utils.py, ``all_gather_dp_groups``)."""
        size = self.job.weight_bytes * self.partition.numel
        self.ledger.exchange(ExchangeKind.ALL_GATHER, size, self.ranks, Hiding.NONE)


def is_cut(segment: Segment) -> bool:
    """Whether it is the head, whose loss has more tiles than one."""
    if segment.part is not ModelPart.HEAD:
        return False
    return any(each.tiles is not None and each.tiles.count > 1 for each in segment.operations)
