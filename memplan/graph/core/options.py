"""What decides how a model's operations are written down."""

from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.fast_dataclass import HashedOnce, dataclass
from memplan.graph.core.splits import PLAIN_SPLIT, SplitPlan
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import TILED_LOSSES, WHOLE, Kernels, Packing
from memplan.training.choices_of_kernels.sdpa import DEFAULT_SUPPORT, SdpaSupport
from memplan.training.compilation import Compilation
from memplan.training.freezing import FrozenParts
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.objectives import LogProbabilities, Objective
from memplan.training.splitting.context_parallel import ContextParallel
from memplan.training.splitting.expert_parallel import ExpertParallel
from memplan.training.splitting.parallelism import StagePlace, TensorParallel

if TYPE_CHECKING:
    from memplan.graph.core.overlay import Overlay
    from memplan.graph.core.quantizer import Quantizer
    from memplan.graph.core.trained_alone import TrainedAlone
    from memplan.training.adapters import Adapter
    from memplan.training.quantization import Quantization
    from memplan.training.splitting.megatron import MegatronLayers


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeOptions(HashedOnce):
    """What decides how the operations are written down."""

    batch_size: int = 1
    seq_len: int = 1
    target_seq_len: int = 1
    images_per_sample: int = 1
    """Pictures that a sequence holds."""
    image_size: int | None = None
    """Height and width of each; None: as the model's own [pixels]."""
    image_width: int | None = None
    """Its width, where that is another; None: as wide as high."""
    num_frames: int | None = None
    """Frames of each clip of a video; None: as the model's own."""
    audio_seconds: int | None = None
    """Length of each clip; None: as the model's own [s]."""
    packing: Packing = Packing.NONE
    """How sequences lie in the rows."""
    num_sequences: int = 1
    """Of the micro-batch: where all lie in one row, more than there are rows."""
    weights: DType = DType.FP32
    compute: DType = DType.FP32
    """Weights and the residual stream as the layers see them."""
    autocast: DType | None = None
    kernels: Kernels = Kernels()
    dropout: float | None = None
    """Overrides every dropout probability; None keeps the config's."""
    decomposed: bool = False
    """Backward formulas in the elementwise steps of torch's reference decompositions, and gradients
    summed out of place, as fake tensors run them; CUDA has one kernel for each, and sums in place."""
    multiprocessors: int = 132
    """Of the GPU: how a sum over rows is split between thread blocks."""
    threads_per_multiprocessor: int = 2048
    sort_tile: int = 4608
    """Pairs that a block of a sort takes on (``memplan.graph.core.sorting``)."""
    grouped_workspace_bytes: int = 67584
    """Of the GPU: what its kernel of grouped products in bf16 works in; 0: it has none (``hardware.gpu``)."""
    is_ampere: bool = True
    """The GPU has compute capability 8 or a later one, which some packages ask for."""
    sdpa: SdpaSupport = DEFAULT_SUPPORT
    """Which attention kernels the GPU has."""
    checkpointed_layers: float | CheckpointedLayers = 0.0
    """Which layers' activations are recomputed: a share, of the first ones, or their numbers."""
    selective: bool = False
    """Checkpointing is selective, by the kernels' policy."""
    module_hooks: bool = False
    """Gradients of modules' inputs go through hooks of the engine."""
    layer_hooks: bool = False
    """Those of what layers are given do (FSDP2, ``RegisterPostBackwardFunction``)."""
    casts_inputs: bool = False
    """Every layer casts the floating-point tensors that it is handed (FSDP2, ``cast_forward_inputs``)."""
    python_linear: bool = False
    """Linear layers are an ``autograd.Function`` in place of PyTorch's own kernels."""
    outputs_held: bool = False
    """The training loop keeps the logits until after backward."""
    upcast_outputs: bool = False
    """The training loop copies the logits to fp32."""
    fp8: Fp8Recipe = Fp8Recipe.NONE
    """What linear layers multiply in."""
    fp8_transposes: bool = True
    """The card multiplies narrow operands in one layout only, so that backward needs transposes."""
    gathers_codes: bool = False
    """Sharded weights are cast before they are gathered (torchao's fp8 all-gather)."""
    casts_weights_again: bool = False
    """Narrow copies of weights are made anew in backward (TransformerEngine under FSDP2)."""
    tensor_parallel: TensorParallel | None = None
    """How the model is split over ranks; the sizes of its spec are a rank's own then."""
    offload: ActivationOffload = ActivationOffload.NONE
    """What goes to CPU RAM between the passes."""
    weights_stay: bool = True
    """Weights are where they were when the hooks that offload were made."""
    megatron: "MegatronLayers | None" = None
    """Its layers are Megatron-core's, written down by its own settings."""
    expert_ranks: int = 1
    """Over which Megatron spreads its experts."""
    stage: StagePlace | None = None
    """Of a pipeline: the model's layers are a stage's own then."""
    split_plan: SplitPlan = PLAIN_SPLIT
    """Which parts of its layers they share, and how."""
    context_parallel: ContextParallel | None = None
    """How ranks share each sequence; ``seq_len`` is a rank's share then."""
    expert_parallel: ExpertParallel | None = None
    """How experts are spread over ranks."""
    freeze: FrozenParts = FrozenParts()
    """Parts whose parameters are not trained."""
    trained: "TrainedAlone | None" = None
    """The parameters that alone are trained, where ``freeze`` names them; found when the model is recorded."""
    compile: Compilation = Compilation.NONE
    """What torch.compile is given."""
    input_gradients: bool = False
    """What comes out of the input embeddings requires a gradient (``enable_input_require_grads``)."""
    adapter: "Adapter | None" = None
    """What is trained in place of the model's own weights."""
    adapter_dtype: DType = DType.FP32
    """What its weights are as the layers see them."""
    adapter_input: DType = DType.FP32
    """What an adapter casts its input to: what it takes its weights' format for."""
    adaptation: "Overlay | None" = None
    """The adapter laid over the model; found when it is recorded."""
    objective: Objective = Objective.TASK
    """What a language model's head ends in."""
    log_probabilities: LogProbabilities = LogProbabilities.ROWWISE
    """How log-probabilities come from logits."""
    kept_logits: int | None = None
    """Tokens at the end of each sequence that have logits; None: all."""
    without_gradients: bool = False
    """The pass runs under ``torch.no_grad()``: nothing is kept."""
    of_trained: bool = False
    """Such a pass is one of the trained model: its weights are leaves that want gradients all the same."""
    evaluated: bool = False
    """Such a pass ends in the loss, as that of a step does: evaluation."""
    quantization: "Quantization | None" = None
    """How the weights of linear layers are packed, its formats filled in."""
    norms: DType | None = None
    """What the weights of norms are held in, where that is not the compute format."""
    quantized_from: DType = DType.FP32
    """What they were quantized from."""
    quantizer: "Quantizer | None" = None
    """The same for a model's class; found when it is recorded."""

    @property
    def ends_in_loss(self) -> bool:
        """Whether a loss of its own follows: a pass for somebody else's has none."""
        return self.evaluated or not self.without_gradients

    @property
    def is_tiled(self) -> bool:
        """Whether a network or the loss runs a tile at a time."""
        return self.kernels.mlp_tiles != WHOLE or self.kernels.loss in TILED_LOSSES
