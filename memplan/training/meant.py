"""What people call the choices of a training setup elsewhere: looked up where a name is not known."""

from collections.abc import Mapping
from enum import Enum

from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import Offload, Recomputation
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    AttentionKernel,
    FeedForwardKernel,
    LossKernel,
    NormKernel,
    Packing,
)
from memplan.training.compilation import Compilation
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.splitting.context_parallel import ContextParallelKind
from memplan.training.splitting.parallelism import PipelineSchedule

MEANT: Mapping[type[Enum], Mapping[str, str]] = {
    Recomputation: {
        **dict.fromkeys(("true", "yes", "on", "gradient", "activation"), "'full'"),
        **dict.fromkeys(("false", "no", "off"), "'none'"),
    },
    Optimizer: {
        **dict.fromkeys(("adam", "adamw", "adamw_torch_fused", "fused"), "'adamw-fused'"),
        **dict.fromkeys(("adamw_torch", "foreach"), "'adamw-foreach'"),
    },
    Compilation: {
        **dict.fromkeys(("true", "yes", "on", "inductor", "whole", "full"), "'model'"),
        **dict.fromkeys(("layers", "block", "blocks", "regional"), "'layer'"),
        **dict.fromkeys(("false", "no", "off"), "'none'"),
    },
    AttentionKernel: {
        **dict.fromkeys(("flash_attention_2", "flash_attn", "flash2", "fa2"), "'flash'"),
        **dict.fromkeys(("flash_attention_3", "fa3"), "'flash3'"),
        "flex_attention": "'sdpa', the nearest that is modelled",
    },
    LossKernel: {
        **dict.fromkeys(("cce", "cut_cross_entropy", "cut_ce"), "'cut'"),
        **dict.fromkeys(("fused_linear_cross_entropy", "flce", "lce"),
                        "'fused_linear'"),
        **dict.fromkeys(("liger_cross_entropy", "cross_entropy"), "'liger'"),
        **dict.fromkeys(("fused_crossentropy", "flash", "inplace_backward", "in_place"),
                        "'flash_attn'"),
        **dict.fromkeys(("torchtitan", "chunkedceloss", "chunked_ce"), "'chunked'"),
        **dict.fromkeys(("cewithchunkedoutputloss", "chunked_output"), "'torchtune'"),
        **dict.fromkeys(("fast_ce", "fast_cross_entropy"), "'foak' or 'unsloth'"),
        "megatron": "'fused'",
    },
    NormKernel: {"unsloth": "'liger', which does the same"},
    FeedForwardKernel: dict.fromkeys(("liger", "swiglu", "geglu"), "'fused'"),
    Packing: {
        **dict.fromkeys(("true", "bfd", "bfd_split", "flatten", "flat", "flattening"),
                        "'padding_free'"),
        **dict.fromkeys(("false", "no", "off", "wrapped"), "'none'"),
        **dict.fromkeys(("packed", "sample_packing", "block_mask"), "'documents'"),
    },
    Offload: dict.fromkeys(("true", "yes", "on"), "'cpu'"),
    ActivationOffload: {
        **dict.fromkeys(("true", "yes", "on", "trl"), "'streamed'"),
        **dict.fromkeys(("cpu", "save_on_cpu"), "'save-on-cpu'"),
        "legacy": "'blocking'",
        **dict.fromkeys(("unsloth", "offload", "cpu_checkpointing"), "'checkpoints'"),
        **dict.fromkeys(("false", "no", "off"), "'none'"),
    },
    ContextParallelKind: {
        **dict.fromkeys(("ulysses", "alst", "alltoall", "all_to_all", "deepspeed"), "'all-to-all'"),
        **dict.fromkeys(("allgather", "torch", "ring_attention", "zigzag"), "'ring'"),
    },
    Engine: {
        **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "zero_1", "zero_2", "zero_3"),
                        "'deepspeed', with the stage beside it"),
        "accelerate": "'fsdp' or 'deepspeed', which it starts",
        "trainer": "'ddp', 'fsdp' or 'deepspeed', which it starts",
    },
    Fp8Recipe: {
        **dict.fromkeys(
            ("true", "yes", "on", "fp8", "torchao", "ao", "tensorwise"), "'torchao-tensorwise'"
        ),
        "rowwise": "'torchao-rowwise'", "rowwise_with_gw_hp": "'torchao-rowwise-with-gw-hp'",
        **dict.fromkeys(("te", "transformer_engine", "delayed", "hybrid"), "'te-delayed'"),
        "mxfp8": "'te-mxfp8'", "nvfp4": "'te-nvfp4'",
    },
    PipelineSchedule: {
        "interleaved1f1b": "'interleaved-1f1b'", "interleaved": "'interleaved-1f1b'",
        **dict.fromkeys(("loopedbfs", "bfs"), "'looped-bfs'"),
        **dict.fromkeys(("interleavedzerobubble", "interleaved_zb", "zb1p", "zero_bubble"),
                        "'interleaved-zero-bubble'"),
        **dict.fromkeys(("zbvzerobubble", "zb_v"), "'zbv'"),
        **dict.fromkeys(("dualpipe", "dual_pipe_v"), "'dualpipev'"),
    },
    Precision: {
        **dict.fromkeys(("float16", "half"), "'fp16'"), "float32": "'fp32'", "bfloat16": "'bf16'",
        **dict.fromkeys(("fp8", "float8", "mxfp8", "nvfp4"), "'bf16', with a recipe of fp8 beside it"),
    },
}  # fmt: skip
"""What people call members elsewhere -> what to write."""
