"""Flash attention's forward scratch: what torch 2.13's CUDA build asked for on a card of 108 multiprocessors."""

from itertools import pairwise
from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.estimator.recording import record, shared_options, tape_options
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.scratch import flash_forward_scratch
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import RESULT
from memplan.graph.core.tape import Tape
from memplan.memory.programs.program import Program
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.step import StepWalk
from memplan.model.attention import AttentionSpec
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.choices_of_kernels.flash_splits import FlashGrid, num_flash_splits
from memplan.training.setup import TrainingSetup

ASKED = [
    ((1, 8, 8, 512, 64), (32768, 2097152)),
    ((2, 16, 16, 512, 64), ()),
    ((1, 12, 12, 512, 64), (49152, 3145728)),
    ((1, 32, 8, 256, 128), ()),
    ((1, 12, 12, 300, 96), (43520, 4147200)),
    ((1, 8, 2, 1024, 256), (98304, 25165824)),
    ((1, 16, 16, 1024, 80), ()),
    ((1, 16, 4, 384, 128), (49152, 6291456)),
    ((1, 7, 7, 1500, 64), (252416, 16128000)),
    ((3, 5, 5, 777, 40), ()),
]
"""Batch, heads, key heads, length, head size -> blocks that were gone when the call returned [bytes]."""


@pytest.mark.parametrize(("sizes", "expected"), ASKED)
def test_what_a_call_asks_for(
    sizes: tuple[int, int, int, int, int], expected: tuple[int, ...]
) -> None:
    batch, heads, key_heads, length, head_dim = sizes
    spec = AttentionSpec(num_heads=heads, num_kv_heads=key_heads, head_dim=head_dim)
    tape = Tape(TapeOptions(multiprocessors=108))
    found = flash_forward_scratch(tape, Shape(batch, length, length, spec))
    assert tuple(size for size in found if size > 0) == expected


def test_neither_dropout_nor_sequences_in_one_row_are_split() -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=64, dropout=0.1)
    tape = Tape(TapeOptions(multiprocessors=108))
    # Of dropout only its state, in the place of one that was made for none.
    assert flash_forward_scratch(tape, Shape(1, 512, 512, spec)) == (
        RESULT,
        RESULT,
        512,
        RESULT,
        ~2,
    )
    plain = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=64)
    assert not flash_forward_scratch(tape, Shape(1, 512, 512, plain, is_varlen=True))
    assert not tape.flash_grids


def test_a_full_card_splits_nothing() -> None:
    grid = FlashGrid.of(heads=32, queries=4096, keys=4096, head_dim=128)
    assert num_flash_splits(grid, 108) == 1
    few = FlashGrid.of(heads=1, queries=64, keys=2**20, head_dim=128)
    assert num_flash_splits(few, 10) == 17, "85 % of the 20 that run at once"


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000,
    "tie_word_embeddings": False,
}  # fmt: skip


def options_of(gpu: str) -> TapeOptions:
    model = load_model(LLAMA)
    setup = TrainingSetup(seq_len=512, precision="bf16")
    return tape_options(setup.resolve(model.context_length, has_bf16=True), load_gpu(gpu))


def test_cards_share_a_walk_where_they_split_alike() -> None:
    model = load_model(LLAMA)
    a100, a40, l4 = (shared_options(model, options_of(gpu)) for gpu in ("a100-80gb", "a40", "l4"))
    assert record(model, options_of("a100-80gb")).flash_grids != {}
    assert a100 == a40 != l4
    assert l4.multiprocessors == 58


def test_both_blocks_come_behind_the_results_and_go_in_that_order() -> None:
    model = load_model(LLAMA)
    setup = TrainingSetup(seq_len=512, precision="bf16").resolve(
        model.context_length, has_bf16=True
    )
    tape = record(model, tape_options(setup, load_gpu("a100-80gb")))
    program = Program(RankInput(tape=tape, passes=StepWalk(tape).run(), setup=setup), Ledger())
    program.run(num_steps=1)
    events = program.ledger.events
    sums, accumulator = 4 * 2 * 8 * 512, 4 * 2 * 8 * 512 * 64
    first = next(
        i for i, pair in enumerate(pairwise(events))
        if pair == (sums, accumulator)
    )  # fmt: skip
    out = 512 * 512 * DType.BF16.num_bytes
    assert out in events[first - 4 : first]
    later = events[first + 2 : first + 6]
    assert later.index(~first) + 1 == later.index(~(first + 1))
