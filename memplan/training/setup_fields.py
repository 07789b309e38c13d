"""The fields of a training setup: what a user may say, and what stands where nothing is said."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.fast_dataclass import HashedOnce, dataclass
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import (
    AllocatorKind,
    Checkpointing,
    FsdpStrategy,
    Offload,
    Recomputation,
    ZeroStage,
)
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    FITTING_TILES,
    WHOLE,
    AttentionKernel,
    FeedForwardKernel,
    KernelPreset,
    Kernels,
    LossKernel,
    NormKernel,
    Packing,
    RotaryKernel,
    ScanKernel,
)
from memplan.training.compilation import Compilation
from memplan.training.freezing import FrozenParts
from memplan.training.jobs import PLAIN, Job
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.splitting.context_parallel import ContextParallelKind
from memplan.training.splitting.expert_parallel import Imbalance
from memplan.training.splitting.parallelism import PipelineSchedule

if TYPE_CHECKING:
    from memplan.training.adapters import Adapter
    from memplan.training.averaging import Ema
    from memplan.training.evaluation import Evaluation
    from memplan.training.lengths import Lengths
    from memplan.training.quantization import Quantization


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupFields(HashedOnce):
    """What is said of a run. ``TrainingSetup`` reads and checks it."""

    num_gpus: int = 1
    """All GPUs of the job."""
    num_nodes: int | None = None
    """Machines; divides ``num_gpus``. None: one for every 8 GPUs."""
    engine: Engine | None = None
    """None: ddp on one GPU and where one model is spread over all of them, fsdp where tensor or pipeline
    parallelism leaves ranks of data, else deepspeed."""
    zero_stage: ZeroStage | None = None
    """DeepSpeed's stage. None: 2."""
    fsdp_strategy: FsdpStrategy | None = None
    """None: full_shard."""
    micro_batch_size: int = 1
    """Sequences of one forward pass on one data-parallel rank."""
    gradient_accumulation_steps: int = 1
    """Forward and backward passes for each optimizer step."""
    seq_len: int | None = None
    """Tokens of a sequence. None: the model's context length, at most 2048."""
    target_seq_len: int | None = None
    """Tokens of a target sequence in an encoder-decoder. None: as ``seq_len``."""
    images_per_sample: int = 1
    """Pictures that a sequence holds, where the model sees; ``seq_len`` counts their tokens too. 0: text alone, of which
    no gradient reaches what sees or hears."""
    image_size: int | None = None
    """Height and width of each [pixels]. None: as the config says, or 672 where it does not."""
    image_width: int | None = None
    """Width of each, of models that make pictures or video; ``image_size`` is the height then [pixels].
    None: as wide as high."""
    num_frames: int | None = None
    """Frames of each clip, of models that make video. None: as the config says, or the model's usual."""
    audio_seconds: int | None = None
    """Length of each clip [s]. None: 30, as Whisper's always are."""
    precision: Precision | None = None
    """None: the engine's usual one, in fp16 on a card without bf16; ``fp16``: the engine's form."""
    fp8: Fp8Recipe = Fp8Recipe.NONE
    """What linear layers multiply in, where it is less than 16 bits."""
    optimizer: Optimizer = Optimizer.ADAMW_FUSED
    """Also by the names that transformers' ``TrainingArguments`` has for it."""
    optimizer_options: Mapping[str, object] | tuple[tuple[str, object], ...] = ()
    """The optimizer's own settings, as far as they move memory: ``rank``, ``momentum``, ``block_size``."""
    optimizer_in_backward: bool = False
    """Each gradient is stepped and let go as soon as it is there."""
    checkpointing: Checkpointing = Recomputation.NONE
    """A ``Recomputation``, or the layers that are recomputed in full: a share of them up to 1, a number
    of the first ones from 2 on, or their numbers (``0-7,12``)."""
    kernels: KernelPreset | Kernels = KernelPreset.HF
    """A code base's kernels, or a choice of one's own."""
    attention: AttentionKernel | None = None
    """Overrides the kernels' attention."""
    norm: NormKernel | None = None
    """Overrides the kernels' norm."""
    mlp: FeedForwardKernel | None = None
    """Overrides the kernels' feed-forward network."""
    rotary: RotaryKernel | None = None
    """Overrides the kernels' rotary embeddings."""
    scan: ScanKernel | None = None
    """Overrides the kernels' state-space scans (Mamba)."""
    loss: LossKernel | None = None
    """Overrides the kernels' loss."""
    mlp_tiles: int = WHOLE
    """Tiles in which feed-forward networks run, forward and again in backward (ALST's tiled MLP); 0: a
    rank's tokens over the hidden size, as in its recipes."""
    loss_tiles: int = FITTING_TILES
    """Tiles of a loss that runs in tiles; 0: each has a GiB of fp32 logits."""
    packing: Packing = Packing.NONE
    """How the sequences of a micro-batch lie in its rows."""
    dropout: float | None = None
    """Every dropout probability; None: the config's own, in train mode."""
    tensor_parallel: int = 1
    """GPUs over which heads, feed-forward networks and the vocabulary are split: by Megatron under its
    engine, else by DTensor."""
    sequence_parallel: bool = False
    """Between the split blocks each of them has a share of every sequence."""
    loss_parallel: bool = False
    """The logits stay split over the vocabulary, and the loss is computed so."""
    pipeline_parallel: int = 1
    """GPUs over which the layers are spread, in stages; the micro-batches of a step are
    ``gradient_accumulation_steps``."""
    pipeline_schedule: PipelineSchedule | None = None
    """None: 1f1b, where there is a pipeline."""
    virtual_stages: int = 1
    """Stages of each of these GPUs; where the schedule is one of several, 1 stands for 2."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage, the first one's first. None: as many in each, or, where they do not divide,
    torchtitan's rule, by which embedding and head count as a layer each."""
    context_parallel: int = 1
    """GPUs that share each sequence: every tensor of tokens is cut by it."""
    context_parallel_kind: ContextParallelKind | None = None
    """How attention sees the others' tokens. None: all-to-all under deepspeed, else ring."""
    expert_parallel: int = 1
    """GPUs of which each has other experts of every mixture; they are among those of the data."""
    expert_imbalance: Imbalance | None = None
    """Tokens that the experts of the fullest GPU are given, over an even share: an assumption, since routers
    decide it. A number or a range, ``1-1.5``, over which the answer is one too. None: 1 to 1.25."""
    offload_optimizer: Offload = Offload.NONE
    offload_param: Offload = Offload.NONE
    offload_activations: ActivationOffload = ActivationOffload.NONE
    """What is kept for the backward pass and goes to CPU RAM in between, and how."""
    offload_activations_ratio: float = 1.0
    """Which share of a pass's activations goes, where they go in chunks."""
    freeze: FrozenParts = FrozenParts()
    """Parameters that are not trained."""
    adapter: "Adapter | None" = None
    """What is trained in place of the model's own weights, which are frozen."""
    job: Job = PLAIN
    """What is trained for, and which other models take part: ``dpo``, ``grpo:rollout=vllm``, …"""
    ema: "Ema | None" = None
    """An exponential average of the weights beside them: ``weights``, ``fp32``, ``bf16@cpu``."""
    evaluation: "Evaluation | None" = None
    """Batches without gradients between steps: how many sequences, whose logits are kept. None: none."""
    lengths: "Lengths | None" = None
    """Sequences of unequal lengths: the figures are those of the worst batch. ``seq_len`` is then what
    longer ones are cut to, or the length of a packed row."""
    quantize: "Quantization | str | None" = None
    """How the frozen base is quantized: ``nf4``, ``fp4``, ``int8``, ``gptq``, ``awq``, or a
    ``Quantization``; ``none``: not at all. None: as the model's own config says."""
    outputs_held: bool = False
    """The training loop keeps the model's outputs (the logits) until after backward."""
    gradients_held: bool = False
    """The training loop lets a step's gradients go behind the next forward pass, not before it: Lightning's."""
    upcast_outputs: bool = False
    """accelerate's mixed precision copies the outputs to fp32 (HF Trainer with ``bf16=True``)."""
    compile: Compilation = Compilation.NONE
    """What torch.compile is given: nothing, each layer, or the whole model with its loss."""
    allocator: AllocatorKind = AllocatorKind.DEFAULT
    left_out: tuple[str, ...] | str = ()
    """What the job holds beside what is counted, such as a reference model, in words: the figures
    are lower bounds then, and no verdict says fits."""
    engine_options: Mapping[str, object] | tuple[tuple[str, object], ...] = ()
    """The engine's own settings by their own names."""
    kernel_scratch: bool = True
    """Count cuBLAS workspaces and scratch inside kernels, and CUDA's fused backward kernels; False
    compares with records of fake tensors, which have neither."""
