"""Events of a run: each block freed once, sums that are the walk's levels, and torch's order."""

from collections.abc import Sequence
from itertools import product

import pytest

from memplan.dtypes import DType
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import RESULT, scratch_changes
from memplan.graph.model import record_model
from memplan.graph.operations.reduction import Multiprocessors, column_sum_scratch
from memplan.memory.passes import StepPasses
from memplan.memory.step import StepWalk
from memplan.memory.walks.walk import WORKSPACE, Event
from memplan.sources.models import load_model
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels

HIDDEN, INNER, VOCAB, TOKENS = 512, 1024, 4096, 256
ROWS = TOKENS * HIDDEN * 2
"""A bf16 activation of the hidden size [bytes]."""
FAMILIES = ("llama", "bert", "bloom", "gpt2", "olmo2", "t5", "stablelm")
FORMATS = ((DType.FP32, None), (DType.BF16, None), (DType.FP32, DType.BF16))
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB,
    "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2,
}  # fmt: skip
OWN_SIZES = {
    "bloom": {"n_head": 8, "n_layer": 2},
    "gpt2": {"n_embd": HIDDEN, "n_head": 8, "n_layer": 2},
    "t5": {"d_model": HIDDEN, "num_heads": 8, "num_layers": 2, "d_kv": 64, "d_ff": INNER},
}


def passes_of(family: str, **options: object) -> StepPasses:
    model = load_model({"model_type": family, **SIZES, **OWN_SIZES.get(family, {})})
    defaults = {"batch_size": 2, "seq_len": TOKENS, "target_seq_len": TOKENS}
    return StepWalk(record_model(model, TapeOptions(**(defaults | options)))).run()


def highest_and_last(events: Sequence[Event]) -> tuple[int, int]:
    """The highest sum of what is alive, and the last one; what was there before is not known."""
    sizes: dict[object, int] = {}
    live = highest = 0
    for key, size in events:
        if size:
            assert key not in sizes, "a block is asked for twice"
            sizes[key] = size
            live += size
            highest = max(highest, live)
        elif key is not WORKSPACE:
            live -= sizes.pop(key)
    return highest, live


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("formats", "checkpointed"), [*product(FORMATS, (0.0, 1.0))])
def test_forward_events_are_the_walks_levels(
    family: str, formats: tuple[DType, DType | None], checkpointed: float
) -> None:
    """To the byte, and no block is freed that is not there."""
    compute, autocast = formats
    passes = passes_of(
        family, compute=compute, weights=compute, autocast=autocast,
        checkpointed_layers=checkpointed,
    )  # fmt: skip
    for each in passes.forward:
        found = highest_and_last(each.profile.events)
        assert found == (each.profile.peak.total_bytes, each.profile.end.total_bytes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [0.0, 1.0])
def test_backward_frees_every_block_once(family: str, checkpointed: float) -> None:
    passes = passes_of(family, compute=DType.BF16, checkpointed_layers=checkpointed)
    for each in passes.backward:
        alive: set[object] = set()
        freed: set[object] = set()
        for interval in each.intervals:
            for key, size in interval.events:
                if size:
                    assert key not in alive
                    alive.add(key)
                    freed.discard(key)
                elif key is not WORKSPACE:
                    assert key not in freed
                    alive.discard(key)
                    freed.add(key)


def test_bert_layer_ends_with_its_inner_frames() -> None:
    """Checked against PyTorch's CUDA build: what dropout returned goes before the first norm's result."""
    passes = passes_of("bert", compute=DType.BF16, checkpointed_layers=1.0, batch_size=1)
    layer = next(each for each in passes.forward if each.segment.checkpointed)
    freed: list[object] = [key for key, size in layer.profile.events if not size]
    dropped = layer.segment.operations[-2].inputs[0].storage
    first_norm = layer.segment.operations[-2].inputs[1].storage
    assert freed[-1] is first_norm
    assert freed.index(dropped) < freed.index(first_norm)


def test_casts_come_from_the_last_argument_to_the_first() -> None:
    """Autocast's linear layer: bias, weight, input, product."""
    passes = passes_of("gpt2", compute=DType.FP32, autocast=DType.BF16)
    head = passes.forward[1].profile.events
    casts = [size for key, size in head if size][3:7]
    assert casts == [3 * HIDDEN * 2, 3 * HIDDEN * HIDDEN * 2, 2 * ROWS, 2 * 3 * ROWS]


def test_eager_attention_keeps_no_blocks_for_later() -> None:
    kernels = Kernels(attention=AttentionKernel.EAGER)
    passes = passes_of("llama", compute=DType.BF16, kernels=kernels)
    for each in passes.forward:
        found = highest_and_last(each.profile.events)
        assert found == (each.profile.peak.total_bytes, each.profile.end.total_bytes)


def test_scratch_steps() -> None:
    before, after = scratch_changes((512, 1024, ~0, RESULT, 2048))
    assert [size for _, size in before] == [512, 1024, -512]
    assert [size for _, size in after] == [2048, -2048, -1024]


@pytest.mark.parametrize(
    ("outputs", "rows", "num_bytes", "multiprocessors", "expected"),
    [
        pytest.param(768, 2048, 4, 132, 12_582_912, id="roberta's bias, H100"),
        pytest.param(3072, 2048, 4, 132, 50_331_648, id="its inner bias, H100"),
        pytest.param(3584, 4096, 2, 108, 113_770_496, id="qwen2's norm, A100"),
        pytest.param(512, 4096, 2, 108, 16_777_216, id="its key bias, A100"),
    ],
)
def test_sums_over_rows(
    outputs: int, rows: int, num_bytes: int, multiprocessors: int, expected: int
) -> None:
    """As PyTorch's CUDA build asked for it."""
    size = outputs * rows * num_bytes
    (blocks,) = column_sum_scratch(outputs, rows, size, Multiprocessors(multiprocessors))
    assert blocks[0] == expected
