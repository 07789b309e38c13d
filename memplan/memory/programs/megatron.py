"""Megatron's training loop on one rank: contiguous gradients, and an optimizer that is sharded or not.

Megatron-core 0.16.1, core/distributed/distributed_data_parallel.py, core/optimizer/optimizer.py
(``Float16OptimizerWithFloat16Params``, ``FP32Optimizer``) and distrib_optimizer.py (``DistributedOptimizer``).
Gradients are added up in the buffer as they come, and autograd's own are let go; weights are stepped as
fp32 copies and copied back where they lie.
"""

from collections.abc import Mapping

from memplan.dtypes import DType
from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.megatron.buffers import groups_of, shard_ranks
from memplan.memory.megatron.options import MegatronStates
from memplan.memory.megatron.reducer import Reducer
from memplan.memory.programs.program import Program
from memplan.memory.programs.stepping import stepped
from memplan.memory.programs.weights import Weight
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.optimizers.script import Stepped
from memplan.training.splitting.exchange import ExchangeKind
from memplan.training.splitting.megatron import TransformerImpl
from memplan.units import MIB, ceil_div

_GLOBAL_BUFFER = "Megatron's global memory buffer"
_CODES = "TransformerEngine's codes of a weight, by row and by column"
_DUMMIES = "a gradient that autograd is handed for all weights of a shape"
_COPIES = "fp32 copies of the gradients that this rank steps"
_STEPPED = "every parameter that this rank steps"
ENGINE_WORKSPACE_BYTES = 32 * MIB
"""TransformerEngine's own for cuBLAS (2.11, pytorch/module/base.py, ``get_cublas_workspace_size_bytes``)."""


def megatron_program(
    given: RankInput, ledger: Ledger, *, workspace_bytes: int, rank: int
) -> Program:
    """Megatron's loop, or one of one's own over its layers."""
    layers = given.tape.options.megatron
    assert layers is not None
    if not layers.wrap_with_ddp:
        MegatronStates.of(given.setup)
        return MegatronLayersProgram(given, ledger, workspace_bytes=workspace_bytes)
    return MegatronProgram(given, ledger, workspace_bytes=workspace_bytes, rank=rank)


class MegatronLayersProgram(Program):
    """Megatron's layers, and what they hold for the whole run, in a plain loop."""

    def __init__(self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        super().__init__(given, ledger, workspace_bytes=workspace_bytes)
        self.process = Process()
        self.has_codes = False
        """Of weights, where they are multiplied in 8 bits."""

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """The first layer's pass asks for the global buffer, which later ones share."""
        if segment.is_layer and repetition == 0:
            self._make_buffers()
            self._make_codes()

    def _make_codes(self) -> None:
        """Narrow copies of weights, which the first micro-batch makes and later ones read."""
        if self.has_codes:
            return
        self.has_codes = True
        for weight in self.weights:
            if weight[0].codes_bytes:
                self.ledger.allocate(weight[0].codes_bytes, 0, ComponentKind.PARAMETERS, _CODES)

    def share(self, first: Program) -> None:
        """All stages of a rank take the same buffers."""
        assert isinstance(first, MegatronLayersProgram)
        self.process = first.process

    def _make_buffers(self) -> None:
        ledger, process = self.ledger, self.process
        kind = ComponentKind.COMMUNICATION_BUFFERS
        layers = self.given.tape.options.megatron
        assert layers is not None
        has_engine = layers.transformer_impl is not TransformerImpl.LOCAL
        if has_engine and self.given.setup.kernel_scratch and not process.has_workspace:
            process.has_workspace = True
            words = "TransformerEngine's cuBLAS workspace"
            ledger.allocate(ENGINE_WORKSPACE_BYTES, 0, ComponentKind.KERNEL_SCRATCH, words)
        stand_ins = self.given.passes.stand_ins
        # Each is larger than the one before it, and so is its number.
        sizes = stand_ins.buffers if stand_ins else self.given.tape.buffers_in_use
        for size in sizes:
            if size <= process.buffer_bytes:
                continue
            grown = ledger.allocate(size, 0, kind, _GLOBAL_BUFFER)
            if process.buffer is not None:
                ledger.free(process.buffer)
            process.buffer, process.buffer_bytes = grown, size


class Process:
    """What a rank has once, whatever stages it runs."""

    def __init__(self) -> None:
        self.has_workspace = False
        self.buffer: Block | None = None
        self.buffer_bytes = 0
        self.dummies: set[tuple[int, ...]] = set()
        """Shapes of weights that have a gradient that is none."""


class MegatronProgram(MegatronLayersProgram):
    """One rank of Megatron's own loop."""

    weight_words: Mapping[ComponentKind, str] = {
        **Program.weight_words,
        ComponentKind.PARAMETERS: "the rank's part of every weight",
        ComponentKind.MASTER_WEIGHTS: "an fp32 copy of each parameter that this rank steps",
    }

    def __init__(
        self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0, rank: int = 0
    ) -> None:
        super().__init__(given, ledger, workspace_bytes=workspace_bytes)
        setup = given.setup
        self.states = MegatronStates.of(setup)
        self.rank = rank
        self.weights_dtype = given.formats.weights
        self.gradients_dtype = self.states.main_gradients(self.weights_dtype)
        self.groups = groups_of(given, self.states)
        self.reducer = Reducer(given, ledger, self.states, self.groups)
        self.copies: list[Block] = []
        """Of gradients in fp32, where the main ones are not."""

    # -- what stays ------------------------------------------------------------------------------

    def load(self) -> None:
        """The weights; then a buffer of gradients, and one of weights, into which they are copied."""
        super().load()
        sharded = self.states.use_distributed_optimizer
        for group in self.groups:
            numel = group.buffer.numel
            if sharded:
                size = allocated_bytes(numel, self.weights_dtype)
                words = "one buffer of all weights, padded"
                self.ledger.allocate(size, 0, ComponentKind.PARAMETERS, words)
            size = allocated_bytes(numel, self.gradients_dtype)
            words = f"main gradients in {self.gradients_dtype.label}, one buffer"
            self.ledger.allocate(size, 0, ComponentKind.GRADIENTS, words)
            if sharded:
                present = [self.blocks.pop(self.weights[each]) for each in group.numbers]
                self.ledger.free_all(reversed(present))

    @property
    def stepped_sizes(self) -> list[tuple[Weight, int]]:
        """The parts of weights that this rank steps, in elements."""
        if not self.states.use_distributed_optimizer:
            return [(weight, weight[0].numel) for weight in self.weights]
        shards = [each for group in self.groups for each in group.shards(self.rank)]
        return [(self.weights[number], numel) for number, numel in sorted(shards)]

    def make_optimizer(self) -> None:
        """fp32 copies of 16-bit weights, each by way of a 16-bit one."""
        if self.weights_dtype is DType.FP32 or self.states.use_precision_aware_optimizer:
            return
        for weight, numel in self.stepped_sizes:
            size = allocated_bytes(numel, self.weights_dtype)
            words = "a part of a weight"
            cloned = self.ledger.allocate(size, 0, ComponentKind.TEMPORARIES, words)
            size = allocated_bytes(numel, DType.FP32)
            self.ledger.allocate(size, 0, ComponentKind.MASTER_WEIGHTS, weight)
            self.ledger.free(cloned)

    # -- a step ----------------------------------------------------------------------------------

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:
        """The last one's gradients may be reduced while they come."""
        self.prepare_backward(last=last)
        super().micro_batch(step, first=first, last=last)

    def prepare_backward(self, *, last: bool) -> None:
        """Whether it is the last one of a step."""
        self.reducer.is_last = last

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """Weights may be gathered while the first forward pass of a step runs."""
        super().before_forward(segment, repetition)
        self.reducer.gather(segment)

    def end_forward(self) -> None:
        """All weights are there."""
        super().end_forward()
        self.reducer.is_gathered = True

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """Buckets that are full may be reduced."""
        super().after_backward(segment, repetition)
        self.reducer.reduce(segment)

    def end_backward(self) -> None:
        """So may the last one."""
        super().end_backward()
        self.reducer.flush()

    def train(self, step: int, *, num_micro_batches: int) -> None:
        """One step; what was copied for the last one is let go first."""
        self.ledger.free_all(self.copies)
        self.copies.clear()
        super().train(step, num_micro_batches=num_micro_batches)

    def begin_backward(self) -> None:
        """TransformerEngine makes one gradient that is none for each shape of weight."""
        for shape in self._dummy_shapes():
            if shape in self.process.dummies:
                continue
            self.process.dummies.add(shape)
            numel = shape[0] * shape[1]
            size = allocated_bytes(numel, self.weights_dtype)
            self.ledger.allocate(size, 0, ComponentKind.GRADIENTS, _DUMMIES)

    def _dummy_shapes(self) -> list[tuple[int, ...]]:
        layers = self.given.tape.options.megatron
        assert layers is not None
        by_engine = layers.transformer_impl is TransformerImpl.TRANSFORMER_ENGINE
        if not (by_engine and layers.gradient_accumulation_fusion):
            return []
        fused: dict[tuple[int, ...], None] = {}
        for segment in self.given.tape.segments:
            for operation in segment.operations:
                if not operation.multiplies:
                    continue
                for tensor in operation.inputs:
                    if isinstance(tensor, Parameter) and len(tensor.shape) == 2:
                        rows, columns = tensor.shape
                        experts = 1 if tensor.experts is None else tensor.experts.num_experts
                        fused[rows // experts, columns] = None
        return list(fused)

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """It is added to the main gradient, and let go."""
        main = 2 * self.gradients_dtype.num_bytes
        moved = weight[0].numel * (main + self.weights_dtype.num_bytes)
        self.ledger.exchange(ExchangeKind.COPY, moved)
        self.ledger.free(block)

    def optimizer_step(self, *, first: bool) -> None:
        """Copies of main gradients that are not fp32; states in the first step; nothing else is made."""
        parts = self.stepped_sizes
        self.reducer.before_step()
        self.ledger.exchange(ExchangeKind.COPY, self._moved_beside(parts))
        copied = self._copied_format()
        if copied is not None:
            self.copies = [
                self.ledger.allocate(
                    allocated_bytes(numel, copied), 0, ComponentKind.GRADIENTS, _COPIES
                )
                for _, numel in parts
            ]
        if self.states.use_precision_aware_optimizer:
            if first:
                self._make_states(parts)
            self.ledger.exchange(ExchangeKind.UPDATE, self._moved_by_engine(parts))
        else:
            tensors = [_part(weight[0], numel) for weight, numel in parts]
            self.optimizer.step(tensors, of=_STEPPED, first=first)
        self.reducer.after_step()

    def _moved_beside(self, parts: list[tuple[Weight, int]]) -> int:
        """Beside the update gradients are read for their norm and clipped, weights copied into 16 bits, and
        all main gradients set to zero [bytes]."""
        numel, main = sum(each for _, each in parts), self.gradients_dtype.num_bytes
        each_part = 3 * main
        if self.weights_dtype is not DType.FP32:
            each_part += DType.FP32.num_bytes + self.weights_dtype.num_bytes
        whole = sum(group.buffer.numel for group in self.groups)
        return numel * each_part + main * whole + self._quantized_bytes()

    def _quantized_bytes(self) -> int:
        """Weights read and their codes written, which the next step's first micro-batch does [bytes]."""
        narrowed = [weight for weight, _ in self.weights if weight.codes_bytes]
        return sum(each.storage.num_bytes + each.codes_bytes for each in narrowed)

    def _moved_by_engine(self, parts: list[tuple[Weight, int]]) -> int:
        """Gradients once, weights and both moments both ways [bytes]."""
        states = self.states
        widths = (states.exp_avg_dtype, states.exp_avg_sq_dtype, states.main_params_dtype)
        each_part = states.main_grads_dtype.num_bytes + 2 * sum(each.num_bytes for each in widths)
        return each_part * sum(numel for _, numel in parts)

    def _copied_format(self) -> DType | None:
        """What gradients are copied to for the step; None where they are read as they are."""
        states = self.states
        wanted = DType.FP32
        if states.use_precision_aware_optimizer:
            wanted = states.main_grads_dtype
        return None if wanted is self.gradients_dtype else wanted

    def _make_states(self, parts: list[tuple[Weight, int]]) -> None:
        """TransformerEngine's FusedAdam: both moments and the weights, each in its own format."""
        states = self.states
        weights = states.main_params_dtype
        remains = (
            states.store_param_remainders
            and weights is DType.FP32
            and self.weights_dtype is DType.BF16
        )
        for weight, numel in parts:
            for dtype in (states.exp_avg_dtype, states.exp_avg_sq_dtype):
                words = f"a moment in {dtype.label} of {_STEPPED}"
                size = allocated_bytes(numel, dtype)
                self.ledger.allocate(size, 0, ComponentKind.OPTIMIZER_STATES, words)
            size = allocated_bytes(numel, DType.BF16 if remains else weights)
            self.ledger.allocate(size, 0, ComponentKind.MASTER_WEIGHTS, weight)

    def host_memory(self) -> HostMemory:
        """CPU RAM: nothing to build the model, and a copy of what the rank writes of a checkpoint.

        Weights are made on the GPU (core/model_parallel_config.py, ``use_cpu_initialization``: off). A
        ``torch_dist`` checkpoint's tensors are copied to the CPU before they are written
        (core/dist_checkpointing/strategies/filesystem_async.py, ``preload_tensors``): the rank's share of
        the weights that data-parallel ranks have alike, and its optimizer's states.
        """
        weights = sum(each.storage.num_bytes for each, _ in self.weights)
        states = self.states
        widths = [each.num_bytes for each in (states.exp_avg_dtype, states.exp_avg_sq_dtype)]
        stepped_numel = sum(numel for _, numel in self.stepped_sizes)
        masters = states.main_params_dtype.num_bytes
        share = ceil_div(weights, shard_ranks(self.given.setup))
        return HostMemory(save_bytes=share + stepped_numel * (sum(widths) + masters))

    def zero_grad(self) -> None:
        """Main gradients are set to zero where they lie."""

    def kept_numel(self, parameter: Parameter) -> int:
        """Every rank has its part of every weight."""
        return parameter.numel


def _part(parameter: Parameter, numel: int) -> Stepped:
    """A part of a weight in fp32, as an optimizer sees it."""
    return stepped(parameter, (numel,), DType.FP32)
