"""What a job asks its scheduler for: GPUs, nodes, CPU RAM, shared memory, processors, disk, time.

What memplan computes is taken as it is: GPUs, the CPU RAM that loading, offloading and saving need, the bytes of a
checkpoint, the high end of a run's time. What no setup says is an assumption with its source, and is printed with the request.

References
----------
.. [1] NVIDIA, *NVIDIA Deep Learning Frameworks User Guide*, section on running containers: ``--shm-size=1g``.
.. [2] PyTorch 2.13, ``torch/utils/data/dataloader.py``: ``prefetch_factor`` is 2 where there are workers.
"""

from collections.abc import Mapping

from memplan.errors import UnsupportedOperationError
from memplan.estimator.estimate import Estimate
from memplan.estimator.time.run_cost import TimeQuestion, run_cost
from memplan.estimator.time.step_time import step_time
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import GpuSpec
from memplan.training.choices import AllocatorKind
from memplan.training.optimizers.script import Stepped, state_bytes
from memplan.training.optimizers.table import chosen
from memplan.training.precision import PRECISIONS, Engine
from memplan.units import GIB, ceil_div

PROCESS_BYTES = 2 * GIB
"""CPU RAM of one rank's process, whatever it trains: 0.49 GiB measured once torch 2.13's CUDA build and transformers 5.23 are imported
(``ru_maxrss``, on stubs of CUDA's libraries), and an assumption for what was not measured: the driver's host side, NCCL's, the script's own."""
WORKER_BYTES = GIB // 2
"""CPU RAM of a data loader's process, an assumption: what importing torch and transformers took there."""
NUM_WORKERS = 4
"""Data loaders of one rank, an assumption; TrainingArguments' own default is 0."""
PREFETCHED = 2
"""Batches that each has ready [2]_."""
TENSORS_OF_A_BATCH, TOKEN_BYTES = 3, 8
"""Ids, labels and mask, in int64."""
NCCL_SHARED_BYTES = GIB
"""What NVIDIA's own containers give ``/dev/shm`` for NCCL and loaders [1]_."""
KEPT_CHECKPOINTS = 2
"""On disk at once: the last, and the one that is written."""
OPTIMIZER_THREADS = 4
"""Processors more for a rank whose optimizer runs on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """A job as a scheduler is asked for it."""

    name: str
    """Letters, digits and dashes, as every scheduler takes."""
    title: str
    """What it trains and needs, in one line for people."""
    gpu: GpuSpec | None
    num_nodes: int
    gpus_per_node: int
    memory_bytes: int
    """CPU RAM of one node."""
    shared_bytes: int
    """Of that, ``/dev/shm``."""
    num_cores: int
    """Processors of one node."""
    disk_bytes: int
    """For checkpoints, over all nodes."""
    time_s: int | None
    """The high end of the run's; None: its length is not given, or its speed not known."""
    environment: Mapping[str, str]
    """Variables that the answer rests on."""
    assumptions: tuple[str, ...]
    """What was taken for granted, a line each."""
    queue: str = ""
    """What its scheduler calls the pool that it is for; nothing: not said."""

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.gpus_per_node


def job_request(answer: Estimate, question: TimeQuestion | None) -> JobRequest:
    """The request for the job of an estimate.

    >>> import memplan
    >>> found = job_request(memplan.estimate("gpt2", gpus=8, gpu="h100"), None)
    >>> found.name, found.num_nodes, found.gpus_per_node, found.memory_bytes // 2**30
    ('gpt2-zero-2-8x', 1, 8, 34)
    """
    setup = answer.setup
    ranks = setup.gpus_per_node
    shared = shared_bytes(answer)
    processes = ranks * (PROCESS_BYTES + NUM_WORKERS * WORKER_BYTES)
    return JobRequest(
        name=_name(answer),
        title=_title(answer),
        gpu=answer.gpu,
        num_nodes=setup.nodes,
        gpus_per_node=ranks,
        memory_bytes=answer.host_bytes + processes + shared,
        shared_bytes=shared,
        num_cores=ranks
        * (1 + NUM_WORKERS + OPTIMIZER_THREADS * (setup.offload_optimizer.value != "none")),
        disk_bytes=KEPT_CHECKPOINTS * checkpoint_bytes(answer),
        time_s=_time_s(answer, question),
        environment=_environment(answer),
        assumptions=_assumptions(answer),
    )


def shared_bytes(answer: Estimate) -> int:
    """``/dev/shm`` of one node: batches that loaders have ready, and NCCL's own [bytes]."""
    setup = answer.setup
    tokens = setup.micro_batch_size * (setup.seq_len or 0)
    batch = tokens * TENSORS_OF_A_BATCH * TOKEN_BYTES
    return NCCL_SHARED_BYTES + setup.gpus_per_node * NUM_WORKERS * PREFETCHED * batch


def checkpoint_bytes(answer: Estimate) -> int:
    """A checkpoint that a run can go on from: weights as they are held, masters and optimizer states [bytes].

    Where adapters are trained they are saved alone (peft: ``save_pretrained``). Factored states count as whole ones.
    """
    setup = answer.setup
    assert setup.precision is not None, "defaults are filled in"
    formats = PRECISIONS[setup.precision]
    trained = answer.trainable_params
    saved = trained if setup.adapter is not None else answer.num_params
    row, options = chosen(setup.optimizer, setup.optimizer_options)
    states = (
        state_bytes(row, options, Stepped((trained,), formats.optimizer_states)) if trained else 0
    )
    masters = 4 * trained if formats.master_weights else 0
    return saved * formats.weights.num_bytes + masters + states


def _time_s(answer: Estimate, question: TimeQuestion | None) -> int | None:
    if question is None or not question.has_length:
        return None
    try:
        time = step_time(answer, site=question.site)
    except UnsupportedOperationError:
        return None
    if question.mfu is not None:
        time = time.with_mfu(question.mfu)
    setup = answer.setup
    sequences = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel
    cost = run_cost(time, question, answer.gpu, sequences=sequences)
    return None if cost is None else ceil_div(int(cost.high_s), 60) * 60 + 60


def _environment(answer: Estimate) -> dict[str, str]:
    """The allocator as the answer takes it; ``PYTORCH_CUDA_ALLOC_CONF`` is read by every torch (``PYTORCH_ALLOC_CONF`` since 2.9)."""
    if answer.certain_bytes is None and answer.setup.allocator is AllocatorKind.EXPANDABLE:
        return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {}


def _name(answer: Estimate) -> str:
    setup = answer.setup
    engine = setup.chosen_engine
    stage = setup.zero_stage
    how = engine.value if stage is None or engine is not Engine.DEEPSPEED else f"zero-{stage.value}"
    raw = f"{answer.model.name}-{how}-{setup.num_gpus}x".lower()
    plain = "".join(each if each.isascii() and each.isalnum() else "-" for each in raw)
    while "--" in plain:
        plain = plain.replace("--", "-")
    return plain.strip("-")[:MAX_NAME].strip("-") or "job"


MAX_NAME = 50
"""Characters of a name: Kubernetes adds some of its own to at most 63 (RFC 1123 labels)."""


def _title(answer: Estimate) -> str:
    setup = answer.setup
    total = answer.total_bytes
    needs = f"{total.low / GIB:.1f}-{total.high / GIB:.1f} GiB needed of each GPU"
    card = f" {answer.gpu.short_name}" if answer.gpu is not None else ""
    verdict = f", {answer.job_verdict}" if answer.job_verdict is not None else ""
    count = f"{setup.num_gpus}{card} GPU{'s' if setup.num_gpus > 1 else ''}"
    return f"{answer.model.name} on {count}: {needs}{verdict}"


def _assumptions(answer: Estimate) -> tuple[str, ...]:
    """What was added to what the estimate says."""
    return (
        f"CPU RAM of a node: {answer.host_bytes / GIB:.1f} GiB for loading, offloading and saving",
        f"CPU RAM of each rank: {PROCESS_BYTES / GIB:g} GiB of its own, {NUM_WORKERS} data loaders of {WORKER_BYTES / GIB:g} GiB",
        f"disk: {KEPT_CHECKPOINTS} checkpoints of {checkpoint_bytes(answer) / GIB:.1f} GiB; the dataset is not in it",
    )
