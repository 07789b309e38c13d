"""Mixers without scores, and CPM-Ant: bytes alive after forward, at both peaks and after backward.

The figures are what torch's allocator counts for transformers' own classes on fake CUDA tensors,
two sequences of 160 tokens, scaled-dot-product attention, no checkpointing.
"""

from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.memory.step import StepWalk
from memplan.sources.about_models.defaults import class_defaults
from tests.plain_step import PlainStep, plain_step

SMALL: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
DELTA: dict[str, Any] = {
    **SMALL, "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "minimax": {**SMALL, "intermediate_size": 512, "num_local_experts": 4, "block_size": 64},
    "qwen3_next": {
        **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3_5_text": {**DELTA, "intermediate_size": 512},
    "lfm2": {
        **SMALL, "intermediate_size": 768, "conv_bias": True,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "cpmant": {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "dim_head": 64,
        "dim_ff": 512, "vocab_size": 1000, "dropout_p": 0.1,
    },
}  # fmt: skip

FIGURES = [
    ("minimax", "bf16", 21_694_464, 23_617_536, 25_079_296, 12_175_872),
    ("qwen3_next", "bf16", 35_672_576, 37_595_648, 38_230_016, 5_585_920),
    ("qwen3_5_text", "bf16", 34_109_952, 36_033_024, 36_667_392, 4_988_416),
    ("qwen3_5_text", "amp", 39_287_296, 41_538_048, 41_844_736, 9_972_736),
    ("qwen3_5_text", "fp32", 43_649_536, 44_932_608, 46_731_776, 9_972_736),
    ("lfm2", "bf16", 13_067_776, 14_990_848, 15_625_216, 4_325_888),
    ("lfm2", "amp", 19_390_976, 21_646_848, 21_948_416, 8_650_752),
    ("lfm2", "fp32", 23_182_848, 24_465_920, 26_266_112, 8_650_752),
    ("cpmant", "fp32", 33_522_176, 35_195_392, 36_082_176, 11_025_408),
    ("cpmant", "bf16", 20_921_856, 21_758_464, 22_201_856, 5_512_704),
]

SLACK = 4096
"""Label tensors of the loss, which the tape writes down a little differently [bytes]."""


def step(model_type: str, precision: str, **options: Any) -> PlainStep:
    config = {"model_type": model_type, **MODELS[model_type]}
    model = read_model(config, source="config.json", name="x", defaults=class_defaults())
    dtype = DType.BF16 if precision == "bf16" else DType.FP32
    chosen: dict[str, Any] = {"batch_size": 2, "seq_len": 160, **options}
    tape = record_model(
        model,
        TapeOptions(
            weights=dtype,
            compute=dtype,
            autocast=DType.BF16 if precision == "amp" else None,
            decomposed=True,
            **chosen,
        ),
    )
    return plain_step(StepWalk(tape).run())


@pytest.mark.parametrize(
    ("model_type", "precision", "after_forward", "forward", "backward", "after_backward"),
    FIGURES,
    ids=[f"{row[0]}-{row[1]}" for row in FIGURES],
)
def test_oracle(
    model_type: str,
    precision: str,
    after_forward: int,
    forward: int,
    backward: int,
    after_backward: int,
) -> None:
    found = step(model_type, precision)
    assert found.after_forward.total_bytes == after_forward
    assert found.after_backward.total_bytes == after_backward
    assert found.forward_peak.total_bytes == pytest.approx(forward, abs=SLACK)
    assert found.backward_peak.total_bytes == pytest.approx(backward, abs=SLACK)


def alive(model_type: str, seq_len: int) -> int:
    return step(model_type, "bf16", seq_len=seq_len).after_forward.total_bytes


def test_lightning_grows_with_the_sequence_alone() -> None:
    """Every block keeps its own scores, so twice the blocks keep no more than twice as much."""
    assert alive("minimax", 1280) == pytest.approx(2 * alive("minimax", 640), rel=0.006)


def test_delta_rule_pads_to_whole_chunks() -> None:
    """One token more than two chunks costs a third one; the next token is nearly free."""
    third = alive("qwen3_5_text", 129) - alive("qwen3_5_text", 128)
    assert third > 20 * (alive("qwen3_5_text", 130) - alive("qwen3_5_text", 129))


def test_checkpointing_keeps_only_inputs() -> None:
    kept = step("lfm2", "bf16", checkpointed_layers=1.0).after_forward.total_bytes
    assert kept < step("lfm2", "bf16").after_forward.total_bytes / 2
