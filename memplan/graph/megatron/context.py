"""What all of Megatron's modules know: sizes of one rank, its group, its settings."""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass, field
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.training.splitting.megatron import MegatronLayers, TransformerImpl


@dataclass(slots=True, kw_only=True)
class MegatronContext:
    """One rank's view of a model that is being written down."""

    tape: Tape
    settings: MegatronLayers
    degree: int
    """Ranks of the tensor-parallel group."""
    sequence: bool
    """Between the split blocks each of them has a share of every sequence."""
    hidden_size: int
    context: int
    """Ranks that share each sequence."""
    is_ring: bool
    """Keys and values go round among them (``cp_comm_type`` p2p), else heads are exchanged (a2a)."""
    experts: int
    """Ranks over which experts are spread."""
    expert_degree: int
    """Ranks over which each expert is split."""
    batch: int
    seq_len: int
    frequencies: Tensor | None = None
    """Angles of every position, in fp32, which the rotary module remembers."""
    buffer_bytes: list[int] = field(default_factory=list)
    """Sizes that the global memory buffer grows to, one after another."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch * self.seq_len

    @property
    def stream_tokens(self) -> int:
        """Of which this rank has the residual stream."""
        return self.tokens // self.degree if self.sequence else self.tokens

    @property
    def dtype(self) -> DType:
        """Of weights and activations."""
        return self.tape.compute

    @property
    def fuses_gradients(self) -> bool:
        """Whether a product writes its weight's gradient into the main gradients, and autograd is handed
        a tensor that all weights of its shape share (TransformerEngine's ``get_dummy_wgrad``)."""
        settings = self.settings
        is_fused = settings.transformer_impl is not TransformerImpl.LOCAL
        return is_fused and settings.gradient_accumulation_fusion and settings.wrap_with_ddp

    @property
    def beside_products(self) -> float:
        """Of a product, the share beside which what it reads is gathered, or what it makes added up.

        (Kwai's ``overlap-sp-ag``, ``overlap-sp-rs``)
        """
        return float(self.settings.transformer_impl is TransformerImpl.KWAI)

    @property
    def weight_gradient(self) -> Gradient:
        """How a product's weight gets its gradient."""
        return Gradient.FUSED if self.fuses_gradients else Gradient.FRESH

    def use_global_buffer(self, numel: int) -> None:
        """Take a tensor out of the global buffer, which is made anew where it is too small.

        Megatron-core 0.16.1, core/utils.py, ``GlobalMemoryBuffer.get_tensor``.
        """
        size = allocated_bytes(numel, self.dtype)
        if not self.buffer_bytes or size > self.buffer_bytes[-1]:
            self.buffer_bytes.append(size)
