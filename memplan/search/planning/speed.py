"""How fast setups of one model are beside one another: rough, and every assumption is a constant.

The unit is the time that the model's own FLOPs take, ``6 x active parameters x tokens`` (Kaplan et
al., arXiv:2001.08361, section 2.1), at the utilisation of large micro-batches. What a setup adds to
it is recomputation, small micro-batches, communication that computing cannot hide, and transfers
to the host. It ranks setups; it is no forecast of tokens per second.
"""

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.planning.sizes import ModelSizes, model_sizes
from memplan.training.choices import FsdpStrategy, Offload, Recomputation, ZeroStage
from memplan.training.choices_of_kernels.kernels import SelectivePolicy
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import PipelineSchedule

FULL_RECOMPUTATION = 1 / 3
"""One more forward pass: 2 of the 6 FLOPs of each parameter and token."""
SELECTIVE_RECOMPUTATION = {
    SelectivePolicy.EVERY_OTHER_MATMUL: 0.4 / 3,
    SelectivePolicy.CORE_ATTENTION: 0.05,
}
"""Every second matrix product again (torchtitan), or only scores, softmax and their product; the
latter grows with the sequence and is small below 8k tokens (Korthikanti et al., arXiv:2205.05198,
section 5)."""
HALF_SPEED_TOKENS = 256
"""Tokens of a micro-batch at which a GPU reaches half of its speed: about the rows from which a product takes longer
than reading its weights, 233 on an H100 (700 TFLOP/s over 3.0 TB/s), 130 on an A100 (239 over 1.84)."""
UTILISATION = 0.4
"""Of the data sheet's rate: what tuned training of dense models reaches on A100 and H100 (37-47 %
on H100 in the READMEs of Megatron-LM, torchtitan and llm-foundry)."""
ACHIEVED_BANDWIDTH = 0.8
"""Of a link's nominal rate (ml-engineering, network: 78 % on A100, 82 % on H200; PCIe the same)."""
NODE_LINK_BYTES_PER_S = 50 * 10**9
"""Between nodes, each GPU: 400 Gbit/s, one direction, as in HGX clusters; an assumption."""
HOST_BYTES_PER_S = 200 * 10**9
"""What the optimizer reaches in the memory of one node's CPUs; an assumption."""
HOST_STEP_BYTES = 28
"""Read and written by one Adam step for each parameter: three fp32 tensors both ways, and the
gradient."""
DEFAULT_TFLOPS = 312.0
"""Of a card that is known by its memory alone: an A100's."""
DEFAULT_PCIE_BYTES_PER_S = 31_500_000_000
"""PCIe 4, 16 lanes."""

ASSUMPTIONS: tuple[str, ...] = (
    f"full recomputation costs {FULL_RECOMPUTATION:.0%} more computing",
    f"a micro-batch of {HALF_SPEED_TOKENS} tokens runs at half speed",
    "communication hides behind computing as far as that lasts",
    f"{NODE_LINK_BYTES_PER_S // 10**9} GB/s per GPU between nodes",
    f"links reach {ACHIEVED_BANDWIDTH:.0%}, GPUs {UTILISATION:.0%} of the data sheet",
    f"offloaded optimizers step at {HOST_BYTES_PER_S // 10**9} GB/s per node, and nothing hides it",
)
"""What the relative speeds rest on, in words."""
MIXTURE_ASSUMPTIONS: tuple[str, ...] = (
    f"an expert that {HALF_SPEED_TOKENS} tokens come to runs at half speed too",
)
"""And of mixtures of experts."""
SPLIT_ASSUMPTIONS: tuple[str, ...] = (
    "sums of split layers and tokens sent to experts are not hidden",
    "a pipeline idles (stages - 1) / (virtual stages x micro-batches) of its computing",
)
"""And of models that are split over GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeSpeed:
    """One GPU's share of the speed it would have without any of the costs."""

    recomputation: float
    """Time for computing again, in units of the model's own computing; as the next ones."""
    small_batches: float
    communication: float
    """What is left of it after overlapping."""
    offload: float
    bubble: float = 0.0
    """Of a pipeline that fills and empties."""

    @property
    def per_gpu(self) -> float:
        """1 where nothing is lost."""
        lost = self.recomputation + self.small_batches + self.communication + self.offload
        return 1 / (1 + lost + self.bubble)


def relative_speed(answer: Estimate, *, active_params: int) -> RelativeSpeed:
    """The speed of one GPU in a setup, beside that of other setups of the same model."""
    sizes = model_sizes(answer.model)
    sizes = replace(sizes, num_params=answer.num_params, active_params=active_params)
    return setup_speed(
        answer.setup, answer.model, answer.gpu, sizes, trainable_params=answer.trainable_params
    )


def setup_speed(
    setup: TrainingSetup,
    model: ModelSpec,
    gpu: GpuSpec | None,
    sizes: ModelSizes,
    *,
    trainable_params: int,
) -> RelativeSpeed:
    """The same without an estimate; the setup has its length and its engine filled in."""
    recomputation = recomputed_share(setup, model)
    tokens = local_tokens(setup)
    small = (1 + recomputation) * HALF_SPEED_TOKENS / rows_of_products(setup, sizes)
    share = sizes.active_params / (setup.tensor_parallel * setup.pipeline_parallel)
    steps = setup.gradient_accumulation_steps
    compute_s = 6 * share * tokens * steps / (UTILISATION * flop_rate(gpu))
    computing = compute_s * (1 + recomputation + small)
    exchange_s = exchanged_bytes(setup, sizes) / exchange_rate(setup, gpu)
    exchange_s += ring_seconds(setup, gpu, sizes)
    shown_s = max(0.0, exchange_s - computing)
    shown_s += split_seconds(setup, gpu, sizes) + routing_seconds(setup, gpu, sizes)
    return RelativeSpeed(
        recomputation=recomputation,
        small_batches=small,
        communication=shown_s / compute_s,
        offload=offload_seconds(setup, trainable_params, gpu) / compute_s,
        bubble=(1 + recomputation + small) * bubble_share(setup),
    )


def local_tokens(setup: TrainingSetup) -> float:
    """Tokens of a micro-batch that one rank sees."""
    return setup.micro_batch_size * (setup.seq_len or 1) / setup.context_parallel


def rows_of_products(setup: TrainingSetup, sizes: ModelSizes) -> float:
    """Rows that products of one micro-batch have on a rank: of an expert the tokens that come to it.

    Of each token's experts a share of all, from as many ranks as they are spread over; the mean is that of
    the times, by where the FLOPs are.
    """
    tokens = local_tokens(setup)
    if not sizes.num_experts:
        return tokens
    chosen = sizes.experts_per_token / sizes.num_experts
    share = min(1.0, sizes.expert_params * chosen / sizes.active_params)
    rows = tokens * chosen * setup.expert_parallel
    return 1 / ((1 - share) / tokens + share / rows)


def bubble_share(setup: TrainingSetup) -> float:
    """Idle time of a pipeline, in units of its computing.

    Equations: ``(p - 1) / m``, with ``v`` stages on each rank ``(p - 1) / (v * m)`` (Narayanan et al.,
    arXiv:2104.04473, sections 2.2.1 and 2.2.2); the zero-bubble schedules have none (Qi et al., arXiv:2401.10241).
    """
    schedule = setup.pipeline_schedule
    if setup.pipeline_parallel == 1 or schedule in WITHOUT_BUBBLE:
        return 0.0
    stages, steps = setup.virtual_stages, setup.gradient_accumulation_steps
    return (setup.pipeline_parallel - 1) / (stages * steps)


WITHOUT_BUBBLE = (
    PipelineSchedule.ZBV, PipelineSchedule.DUALPIPEV, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE,
)  # fmt: skip


def recomputed_share(setup: TrainingSetup, model: ModelSpec) -> float:
    """Computing done twice, as a share of the model's own."""
    value = setup.checkpointing
    if isinstance(value, float):
        return value * FULL_RECOMPUTATION
    if isinstance(value, CheckpointedLayers):
        return value.share(model.num_layers) * FULL_RECOMPUTATION
    if value is Recomputation.SELECTIVE:
        return SELECTIVE_RECOMPUTATION[setup.chosen_kernels.selective]
    return FULL_RECOMPUTATION if value is Recomputation.FULL else 0.0


def exchanged_elements(setup: TrainingSetup) -> int:
    """How many times all parameters cross a GPU's link in one optimizer step.

    A ring moves an all-gather or a reduce-scatter once, an all-reduce twice; DeepSpeed's stages 1
    and 2 all-reduce, stage 2 in every micro-batch (stage_1_and_2.py, ``average_tensor``).
    """
    if setup.data_parallel == 1:
        return 0
    steps = setup.gradient_accumulation_steps
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        by_stage = {
            ZeroStage.NONE: 2, ZeroStage.OPTIMIZER: 3, ZeroStage.GRADIENTS: 2 * steps + 1,
            ZeroStage.PARAMETERS: 3 * steps,
        }  # fmt: skip
        return by_stage[setup.zero_stage or ZeroStage.NONE]
    if engine is Engine.MEGATRON:
        return 3  # main gradients are scattered in fp32, weights gathered in 16 bits
    if engine in (Engine.FSDP, Engine.FSDP1) and setup.fsdp_strategy is not FsdpStrategy.NO_SHARD:
        return (2 if setup.fsdp_strategy is FsdpStrategy.SHARD_GRAD_OP else 3) * steps
    return 2


def exchanged_bytes(setup: TrainingSetup, sizes: ModelSizes) -> int:
    """What one GPU sends for the sake of its parameters in one optimizer step [bytes]."""
    width = PRECISIONS[setup.chosen_precision].compute.num_bytes
    return int(exchanged_elements(setup) * sizes.local_params(setup) * width)


def split_seconds(setup: TrainingSetup, gpu: GpuSpec | None, sizes: ModelSizes) -> float:
    """What adding up split layers takes in one step, which nothing hides [s].

    Four sums of all hidden states in each layer and micro-batch, two in each pass; a ring moves each
    twice, less a rank's own share. Gathers and scatters move as much.
    """
    degree = setup.tensor_parallel
    if degree == 1:
        return 0.0
    moved = 4 * layer_bytes(setup, sizes.num_layers, sizes.hidden_size) * 2 * (degree - 1) / degree
    return moved / group_rate(setup, gpu, degree)


def routing_seconds(setup: TrainingSetup, gpu: GpuSpec | None, sizes: ModelSizes) -> float:
    """What sending tokens to their experts takes in one step, which nothing hides [s].

    Each token's hidden states go to its experts and come back, in both passes (Lepikhin et al.,
    arXiv:2006.16668, section 3.2).
    """
    degree = setup.expert_parallel
    if degree == 1:
        return 0.0
    copies = 4 * sizes.experts_per_token * (degree - 1) / degree
    moved = copies * layer_bytes(setup, sizes.expert_layers, sizes.hidden_size)
    return moved / setup.tensor_parallel / group_rate(setup, gpu, degree * setup.tensor_parallel)


def ring_seconds(setup: TrainingSetup, gpu: GpuSpec | None, sizes: ModelSizes) -> float:
    """What passing keys and values around takes in one step; computing hides it [s].

    Once in forward, and in backward once more with their gradients (Liu et al., arXiv:2310.01889).
    """
    degree = setup.context_parallel
    if degree == 1:
        return 0.0
    each = layer_bytes(setup, sizes.num_layers, sizes.key_value_size) / setup.tensor_parallel
    return 3 * (degree - 1) * each / group_rate(setup, gpu, degree * setup.tensor_parallel)


def layer_bytes(setup: TrainingSetup, num_layers: int, width: int) -> float:
    """So many numbers of each token in each layer that a rank has, in all micro-batches of a step [bytes]."""
    tokens = local_tokens(setup) * setup.gradient_accumulation_steps
    num_bytes = PRECISIONS[setup.chosen_precision].compute.num_bytes
    return num_layers / setup.pipeline_parallel * tokens * width * num_bytes


def group_rate(setup: TrainingSetup, gpu: GpuSpec | None, num_ranks: int) -> float:
    """What one GPU can send to the others of a group of neighbours [bytes/s]."""
    rate = link_rate(gpu)
    if num_ranks > setup.gpus_per_node:
        rate = min(rate, NODE_LINK_BYTES_PER_S)
    return rate * ACHIEVED_BANDWIDTH


def exchange_rate(setup: TrainingSetup, gpu: GpuSpec | None) -> float:
    """What one GPU can send, to the slowest of its neighbours [bytes/s]."""
    rate = link_rate(gpu)
    if setup.nodes > 1:
        rate = min(rate, NODE_LINK_BYTES_PER_S)
    return rate * ACHIEVED_BANDWIDTH


def link_rate(gpu: GpuSpec | None) -> float:
    """What one GPU can send to another of its node by the data sheet [bytes/s]."""
    if gpu is not None and gpu.link is not None:
        return float(gpu.link.bytes_per_s)
    return float(pcie_rate(gpu))


def offload_seconds(setup: TrainingSetup, num_params: int, gpu: GpuSpec | None) -> float:
    """Transfers to and from the host, and the optimizer's step there, in one step [s]."""
    shard = num_params / setup.num_gpus
    width = PRECISIONS[setup.chosen_precision].compute.num_bytes
    pcie = pcie_rate(gpu) * ACHIEVED_BANDWIDTH
    seconds = 0.0
    if setup.offload_optimizer is not Offload.NONE:
        seconds += 2 * width * shard / pcie
        seconds += HOST_STEP_BYTES * shard * setup.gpus_per_node / HOST_BYTES_PER_S
    if setup.offload_param is not Offload.NONE:
        seconds += 2 * width * shard * setup.gradient_accumulation_steps / pcie
    return seconds


def flop_rate(gpu: GpuSpec | None) -> float:
    """A GPU's 16-bit matrix rate by the data sheet [FLOP/s]."""
    rates = gpu.dense_tflops if gpu is not None else None
    known = (rates.bf16 or rates.fp16 or rates.fp32) if rates is not None else None
    return (known or DEFAULT_TFLOPS) * 1e12


def pcie_rate(gpu: GpuSpec | None) -> int:
    """A GPU's link to its host [bytes/s]."""
    if gpu is None or gpu.pcie is None:
        return DEFAULT_PCIE_BYTES_PER_S
    return gpu.pcie.bytes_per_s
