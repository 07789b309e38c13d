"""Textbook formulas, out of the tape: what the papers print is what their kernels keep."""

import pytest

from memplan.dtypes import DType
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.memory.step import StepWalk
from memplan.model.spec import ModelSpec
from memplan.sources.models import load_model
from memplan.training.choices_of_kernels.kernels import KERNEL_PRESETS, KernelPreset
from memplan.units import GIB


def gpt(*, hidden_size: int, num_heads: int, num_layers: int, seq_len: int) -> ModelSpec:
    """A GPT-2 of any size, with its dropouts of 0.1."""
    return load_model(
        {
            "model_type": "gpt2", "n_embd": hidden_size, "n_head": num_heads,
            "n_layer": num_layers, "n_positions": seq_len, "vocab_size": 50176,
        }
    )  # fmt: skip


def kept_by_a_layer(model: ModelSpec, options: TapeOptions) -> int:
    """Bytes that one more layer keeps for the backward pass."""
    layers = [
        each
        for each in StepWalk(record_model(model, options)).run().forward
        if each.segment.repeat > 1
    ]
    assert len(layers) == 1
    return layers[0].later_bytes


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "seq_len", "batch_size"),
    [(4096, 32, 2048, 1), (8192, 64, 2048, 1), (8192, 64, 8192, 1), (1024, 16, 512, 4)],
)
def test_megatron_layer(hidden_size: int, num_heads: int, seq_len: int, batch_size: int) -> None:
    """``sbh(34 + 5as/h)`` (arXiv:2205.05198, equation 2), and two norms' fp32 statistics."""
    model = gpt(hidden_size=hidden_size, num_heads=num_heads, num_layers=4, seq_len=seq_len)
    options = TapeOptions(
        batch_size=batch_size,
        seq_len=seq_len,
        weights=DType.BF16,
        compute=DType.BF16,
        kernels=KERNEL_PRESETS[KernelPreset.MEGATRON],
    )
    s, b, h, a = seq_len, batch_size, hidden_size, num_heads
    assert kept_by_a_layer(model, options) == 34 * s * b * h + 5 * a * s * s * b + 16 * s * b


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "seq_len"), [(4096, 32, 2048), (8192, 64, 8192)]
)
def test_megatron_selective(hidden_size: int, num_heads: int, seq_len: int) -> None:
    """``34sbh`` with core attention computed again (arXiv:2205.05198, section 5)."""
    model = gpt(hidden_size=hidden_size, num_heads=num_heads, num_layers=4, seq_len=seq_len)
    options = TapeOptions(
        seq_len=seq_len,
        compute=DType.BF16,
        kernels=KERNEL_PRESETS[KernelPreset.MEGATRON],
        selective=True,
    )
    kept = kept_by_a_layer(model, options)
    assert kept == 34 * seq_len * hidden_size + 16 * seq_len


@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "num_heads", "seq_len", "gib"),
    [
        pytest.param(80, 8192, 64, 2048, 142.5, id="LLaMA-65B-like"),
        pytest.param(32, 4096, 32, 2048, 28.5, id="LLaMA-7B-like"),
        pytest.param(80, 8192, 64, 8192, 1770, id="LLaMA-65B-like at 8k"),
    ],
)
def test_llama_sums(
    num_layers: int, hidden_size: int, num_heads: int, seq_len: int, gib: float
) -> None:
    """Sums over all layers that are widely printed, GiB under the label GB."""
    model = gpt(
        hidden_size=hidden_size, num_heads=num_heads, num_layers=num_layers, seq_len=seq_len
    )
    options = TapeOptions(
        seq_len=seq_len, compute=DType.BF16, kernels=KERNEL_PRESETS[KernelPreset.MEGATRON]
    )
    total = num_layers * kept_by_a_layer(model, options) / GIB
    assert round(total, 1 if gib < 1000 else 0) == gib


def llama(*, num_kv_heads: int = 32) -> ModelSpec:
    """A Llama with I = 2.75 H."""
    return load_model(
        {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11264,
            "num_attention_heads": 32, "num_key_value_heads": num_kv_heads,
            "num_hidden_layers": 8, "vocab_size": 32000,
        }
    )  # fmt: skip


H, I, HEADS, SEQ = 4096, 11264, 32, 1024
RANDOM_STATE = 2 * 512 / SEQ
"""Flash attention keeps the random state of its dropout, in two blocks of the allocator."""


def per_token(options: TapeOptions, model: ModelSpec | None = None) -> float:
    """Bytes per token that one more Llama layer keeps."""
    return kept_by_a_layer(model or llama(), options) / SEQ


def test_llama_layer() -> None:
    """Two eager norms, SDPA flash, SwiGLU: ``24H + 8I + 4 heads + 8`` bytes per token."""
    found = per_token(TapeOptions(seq_len=SEQ, compute=DType.BF16))
    assert found == 24 * H + 8 * I + 4 * HEADS + 8 + RANDOM_STATE


def test_grouped_queries_are_kept_unexpanded() -> None:
    options = TapeOptions(seq_len=SEQ, compute=DType.BF16)
    saved = per_token(options) - per_token(options, llama(num_kv_heads=8))
    assert saved == 2 * 2 * 24 * 128  # keys and values of 24 heads fewer, 2 bytes each


def test_llama_layer_under_autocast() -> None:
    """fp32 stream, five casts of the norms' outputs: ``34H + 8I + 4 heads + 8``, and the casts of
    the weights, which the graph keeps."""
    found = per_token(TapeOptions(seq_len=SEQ, autocast=DType.BF16))
    weights = 2 * (4 * H * H + 3 * H * I) / SEQ
    assert found == 34 * H + 8 * I + 4 * HEADS + 8 + RANDOM_STATE + weights


def test_torchtitan_selective() -> None:
    """Every other product and the attention output: 15.6H per token at I = 2.75H."""
    options = TapeOptions(
        seq_len=SEQ,
        compute=DType.BF16,
        kernels=KERNEL_PRESETS[KernelPreset.TORCHTITAN],
        selective=True,
        checkpointed_layers=1.0,
    )
    found = per_token(options)
    assert found == 2 * H + 2 * H + 2 * H + 2 * I + 2 * H + 2 * H + 4 * HEADS + RANDOM_STATE
    assert round(found / H, 1) == 15.5


def test_full_checkpointing_keeps_the_input() -> None:
    options = TapeOptions(seq_len=SEQ, compute=DType.BF16, checkpointed_layers=1.0)
    assert per_token(options) == 2 * H
