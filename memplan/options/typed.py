"""The keywords of ``memplan.estimate``, ``memplan.sweep`` and ``memplan.plan``, with their types.

Names, values and defaults are those of the command line's options; None stands for the default. A text is
what would be typed.
"""

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec
    from memplan.training.adapters import Adapter
    from memplan.training.jobs import Job
    from memplan.training.lengths import Lengths
    from memplan.training.setup import TrainingSetup

Path = str | os.PathLike[str]
Word = str | Enum
Words = Word | Sequence[Word]
Number = int | str
"""A whole number, or a text for one: ``8k``."""
Numbers = Number | Sequence[Number]
"""One, several, a ``range``, or a text for them: ``1..32``."""
Size = int | str
"""Bytes, or a text: ``46GiB``."""
OrMax = int | Literal["max"]
"""A whole number, or the largest that fits."""


class ModelOptions(TypedDict, total=False):
    """How a model is read."""

    task: Word | None
    family: str | None
    num_labels: int | None
    revision: str | None
    token: str | None
    allow_guess: bool
    allow_unknown_keys: bool


class SharedOptions(ModelOptions, total=False):
    """What every question takes one value of."""

    gpu_memory: Size | None
    cpu_memory: Size | None
    global_batch_size: int | None
    preset: str | None
    training_args: Path | None
    lora_targets: str | Sequence[str] | None
    lora_dropout: float | None
    lora_dtype: Word | None
    dora: bool
    adapter: "Adapter | Path | None"
    optim_args: str | Mapping[str, object] | None
    job: "Job | str | None"
    ema: str | None
    eval_batch_size: int | None
    eval_batches_kept: int | None
    eval_accumulation_steps: int | None
    eval_seq_len: int | None
    lengths: "Lengths | Path | None"
    time: bool
    tokens: Number | None
    examples: Number | None
    epochs: float
    price: float | Path | None
    mfu: float | str | None
    network: float | str | None
    oversubscription: float
    in_network_reduction: bool
    save_every: float | str | None
    failures_per_gpu_day: float | None
    eval_every: Number | None
    eval_examples: Number | None
    loader: float | None
    host: float | Word | None
    calibration: Path | None


class EstimateOptions(SharedOptions, total=False):
    """Of ``memplan.estimate``."""

    gpus: int
    nodes: int | None
    engine: Word | None
    zero: int | Word | None
    offload: Word | None
    offload_param: Word | None
    fsdp_strategy: Word | None
    batch_size: OrMax
    gradient_accumulation: int
    seq_len: int | str | None
    target_seq_len: int | str | None
    images_per_sample: int
    image_size: int | None
    image_width: int | None
    num_frames: int | None
    audio_seconds: int | None
    tensor_parallel: int
    sequence_parallel: bool
    loss_parallel: bool
    context_parallel: int
    context_parallel_kind: Word | None
    expert_parallel: int
    expert_imbalance: float | str | None
    pipeline_parallel: int
    pipeline_schedule: Word | None
    virtual_stages: int
    layers_per_stage: str | Sequence[int] | None
    fp8: Word
    optimizer: Word
    optimizer_in_backward: bool
    checkpointing: float | Word
    offload_activations: Word
    offload_activations_ratio: float
    kernels: Word
    attention: Word | None
    norm: Word | None
    mlp: Word | None
    mlp_tiles: int
    rotary: Word | None
    scan: Word | None
    loss: Word | None
    loss_tiles: int
    packing: Word
    dropout: float | None
    freeze: str | Sequence[str]
    quantize: Word | None
    outputs_held: bool
    gradients_held: bool
    upcast_outputs: bool
    compile: Word
    allocator: Word
    kernel_scratch: bool
    lora: OrMax | None
    engine_option: str | Sequence[str] | Mapping[str, object] | None
    precision: Word | None
    num_layers: OrMax | None
    deepspeed_config: Path | None
    accelerate_config: Path | None


class SeveralOptions(SharedOptions, total=False):
    """What a sweep and a plan take several values of."""

    gpu: "str | GpuSpec | Sequence[str | GpuSpec] | None"
    gpus: Numbers | None
    nodes: Numbers | None
    engine: Words | None
    zero: Numbers | Words | None
    precision: Words | None
    tensor_parallel: Numbers | None
    pipeline_parallel: Numbers | None
    virtual_stages: Numbers | None
    context_parallel: Numbers | None
    expert_parallel: Numbers | None
    checkpointing: float | Words | Sequence[float | Word] | None
    lora: int | None
    fp8: Words | None
    optimizer: Words | None
    offload_activations: Words | None
    offload_activations_ratio: float | Sequence[float] | None
    kernels: Words | None
    attention: Words | None
    mlp_tiles: Numbers | None
    loss: Words | None
    packing: Words | None
    freeze: Words | None
    quantize: Words | None
    compile: Words | None


class SweepOptions(SeveralOptions, total=False):
    """Of ``memplan.sweep``."""

    setup: "TrainingSetup | Path | None"
    fsdp_strategy: Words | None
    offload: Words | None
    offload_param: Words | None
    batch_size: Numbers | None
    gradient_accumulation: Numbers | None
    seq_len: Numbers | None
    target_seq_len: Numbers | None
    sequence_parallel: bool | Sequence[bool] | None
    context_parallel_kind: Words | None
    pipeline_schedule: Words | None
    engine_option: str | Sequence[str] | Mapping[str, object] | None
    jobs: int
    shard: str | None


class PlanOptions(SeveralOptions, total=False):
    """Of ``memplan.plan``."""

    pools: "str | Path | None"
    setup: "TrainingSetup | Path | None"
    objective: Word
    maximize: Word | None
    allow: Words | None
    headroom: float | str
    limit: int
    batch_size: int
    seq_len: int | str | None
