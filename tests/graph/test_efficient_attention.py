"""What the memory-efficient kernel's backward pass asks for, by card."""

import pytest

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.scratch import efficient_backward_scratch
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.model.attention import AttentionSpec
from memplan.training.choices_of_kernels.sdpa import SDPA_SUPPORT

AMPERE, SMALL, OLDER = (8, 0), (8, 6), (7, 0)
BATCH, HEADS = 2, 4


@pytest.mark.parametrize(
    ("cards", "dtype", "head_dim", "value_head_dim", "length", "words"),
    [
        ((AMPERE, (9, 0), (10, 0), SMALL, OLDER), DType.FP16, 64, 64, 1024, 65600),
        ((AMPERE, (9, 0), (10, 0)), DType.BF16, 72, 72, 1024, 131104),
        ((AMPERE, (9, 0), (10, 0)), DType.BF16, 128, 128, 1024, 131104),
        ((AMPERE,), DType.BF16, 128, 128, 577, 81940),
        ((AMPERE,), DType.BF16, 64, 128, 1024, 131104),
        ((AMPERE,), DType.BF16, 192, 128, 1024, 589920),
        ((AMPERE, (9, 0), (10, 0), SMALL, OLDER), DType.FP16, 160, 160, 1024, 720992),
        ((AMPERE, SMALL, OLDER), DType.FP16, 256, 256, 1024, 786560),
        ((SMALL,), DType.BF16, 96, 96, 1024, 131136),
        ((SMALL,), DType.BF16, 80, 80, 577, 81960),
        ((SMALL,), DType.BF16, 128, 128, 1024, 393344),
        ((SMALL,), DType.BF16, 128, 128, 577, 245840),
        ((SMALL,), DType.BF16, 64, 128, 1024, 262208),
        ((OLDER,), DType.FP16, 128, 128, 1024, 131136),
        ((AMPERE, (10, 0)), DType.FP32, 96, 96, 1024, 131136),
        ((AMPERE,), DType.FP32, 256, 256, 1024, 262272),
        ((SMALL, OLDER), DType.FP32, 96, 96, 1024, 131200),
        ((SMALL, OLDER), DType.FP32, 160, 160, 1024, 196800),
    ],
)
def test_the_workspace_is_the_real_kernels(
    cards: tuple[tuple[int, int], ...],
    dtype: DType,
    head_dim: int,
    value_head_dim: int,
    length: int,
    words: int,
) -> None:
    """Four-byte words of each head, as torch 2.13's CUDA build asks for them: A100, A10G, L4, RTX 4090, V100, T4."""
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=HEADS, head_dim=head_dim, value_head_dim=value_head_dim
    )
    shape = Shape(BATCH, length, length, spec)
    for card in cards:
        tape = Tape(TapeOptions(sdpa=SDPA_SUPPORT[card]))
        out = tape.tensor(shape.outputs, dtype)
        blocks = efficient_backward_scratch(tape, dtype, shape, out)
        assert -(-4 * words * BATCH * HEADS // 512) * 512 in blocks, (card, blocks)
