"""Megatron's own report, against what its script printed for GPT-3 175B and Llama-3-70B.

The figures are of ``theoretical_memory_usage.py`` of Megatron-LM d98e8a64, run with these arguments.
"""

from typing import Any

import pytest

from memplan.formulas.flops import FormulaShape
from memplan.formulas.megatron import (
    MegatronLayout,
    activation_bytes,
    shard_parameters,
    state_bytes,
)

GPT3 = FormulaShape(
    num_layers=96, hidden_size=12288, num_heads=96, num_kv_heads=96, head_dim=128,
    value_head_dim=128, intermediate_size=49152, gated=False, vocab_size=51200,
)  # fmt: skip
LLAMA = FormulaShape(
    num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128,
    value_head_dim=128, intermediate_size=28672, gated=True, vocab_size=129024,
)  # fmt: skip
SELECTIVE = {"sequence_parallel": True, "selective": True}


@pytest.mark.parametrize(
    ("shape", "layout", "states", "activations"),
    [
        pytest.param(
            GPT3, {"tensor_parallel": 8, "pipeline_parallel": 16, "data_parallel": 8,
                   "distributed_optimizer": True, "num_microbatches": 64, **SELECTIVE},
            10784206080, 10318020608, id="gpt-3 on 1024",
        ),
        pytest.param(
            GPT3, {"tensor_parallel": 8, "pipeline_parallel": 8, "virtual_stages": 3, **SELECTIVE},
            50348611584, 13294916266, id="gpt-3 interleaved",
        ),
        pytest.param(
            GPT3, {"tensor_parallel": 8, "pipeline_parallel": 8, "num_microbatches": 4},
            50348611584, 16594413158, id="gpt-3 without sequence parallel",
        ),
        pytest.param(
            LLAMA, {"tensor_parallel": 8, "data_parallel": 4, "distributed_optimizer": True, **SELECTIVE},
            79397462016, 22045270016, id="llama-3-70b on 32",
        ),
        pytest.param(
            LLAMA, {"tensor_parallel": 4, "pipeline_parallel": 4, "data_parallel": 4,
                    "distributed_optimizer": True, "num_microbatches": 2},
            40884848640, 45238222848, id="llama-3-70b in a pipeline",
        ),
    ],
)  # fmt: skip
def test_report(shape: FormulaShape, layout: dict[str, Any], states: int, activations: int) -> None:
    divided = MegatronLayout(**layout)
    tied = shape is GPT3
    params = shard_parameters(shape, tied=tied, rms_norm=not tied, layout=divided)
    assert abs(state_bytes(params, layout=divided) - states) <= 18
    length = 2048 if tied else 8192
    found = activation_bytes(shape, seq_len=length, batch_size=1, layout=divided)
    assert abs(found - activations) <= 1
