"""What the gradient of a table asks for on its way, against PyTorch's CUDA build (torch 2.13.0)."""

import pytest

from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import RESULT, scratch_changes
from memplan.graph.core.sorting import sort_scratch_bytes, sort_tile
from memplan.graph.core.tape import Tape
from memplan.graph.model import record_model
from memplan.graph.operations.lookups import behind_copy, embedding_backward_scratch
from memplan.sources.models import load_model
from memplan.units import round_up

H100, A100 = 132, 108
"""Multiprocessors."""
WIDE = 16384, 8000, 1024, DType.FP32
RECORDED = [
    pytest.param(
        (16384, 32, 16, DType.FP32), H100, [6655, 131072, 8, 131072, 1279, 256, 256, 1279, 8, 13360, 13360],
        id="few rows",
    ),
    pytest.param(
        (16384, 32, 32, DType.BF16), H100,
        [6655, 131072, 8, 131072, 1279, 256, 256, 1279, 8, 13360, 13360, 4096], id="few rows of 16 bits",
    ),
    pytest.param(
        (16384, 512, 1024, DType.FP32), H100,
        [270847, 131072, 8, 131072, 1279, 4096, 4096, 1279, 8, 17200, 17200], id="two passes",
    ),
    pytest.param(
        WIDE, H100, [270847, 131072, 8, 131072, 1279, 64000, 64000, 1279, 8, 77104, 39477248],
        id="many rows",
    ),
    pytest.param(
        (16384, 20000, 16, DType.FP32), H100,
        [270847, 131072, 8, 131072, 1279, 131072, 131072, 1535, 8, 144176, 1153408],
        id="more rows than ids",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "multiprocessors", "recorded"), RECORDED)
def test_scratch(
    case: tuple[int, int, int, DType], multiprocessors: int, recorded: list[int]
) -> None:
    num_ids, num_rows, width, dtype = case
    t = Tape(TapeOptions(multiprocessors=multiprocessors))
    scratch = embedding_backward_scratch(t, num_ids, num_rows * width, width, dtype)
    asked = [step for step in scratch if step > RESULT]
    assert asked[:3] == [8 * num_ids] * 3
    assert asked[3] == recorded[0] + 1
    assert asked[4:] == [round_up(size, 512) for size in recorded[1:]]


@pytest.mark.parametrize(
    ("num_ids", "multiprocessors", "last"),
    [(4096, H100, 136), (8192, A100, 272), (16384, H100, 527), (65536, A100, 431)],
)
def test_from_how_many_rows_on_pieces_are_summed(
    num_ids: int, multiprocessors: int, last: int
) -> None:
    def sums_at_once(num_rows: int) -> bool:
        t = Tape(TapeOptions(multiprocessors=multiprocessors))
        numbers, sums = embedding_backward_scratch(t, num_ids, num_rows * 16, 16, DType.FP32)[-2:]
        return numbers == sums

    assert sums_at_once(last)
    assert not sums_at_once(last + 1)


def test_a_tape_is_another_ones_where_cards_sum_a_table_alike() -> None:
    t = Tape(TapeOptions(multiprocessors=H100))
    assert t.has_few_rows(500)
    assert t.runs_alike_on(TapeOptions(multiprocessors=H100))
    assert not t.runs_alike_on(TapeOptions(multiprocessors=A100))


def test_a_sort_of_one_block_copies_nothing() -> None:
    assert sort_scratch_bytes(2304, largest_key=10**6, tile=4608) == 512
    assert sort_scratch_bytes(2305, largest_key=511, tile=4608) > 2 * 2305 * 8


SORTED = [
    ((4096, 511), (72191, 72191, 71167)),
    ((4096, 255), (4607, 4607, 3583)),
    ((16384, 255), (8703, 7679, 6655)),
    ((16384, 512), (272895, 271871, 270847)),
    ((32768, 8192), (541183, 538111, 537087)),
    ((70000, 300), (1150463, 1144319, 1141247)),
    ((3100, 20000), (56319, 55295, 55295)),
    ((5377, 40), (4607, 4607, 4607)),
    ((9217, 70000), (158719, 157695, 157695)),
    ((100001, 131072), (1644031, 1634815, 1629695)),
]
"""Pairs and their largest key; what the build asked for on a V100 and a T4, an A100, an H100 and a B200."""
CARDS = ((7, 0), (7, 5)), ((8, 0),), ((9, 0), (10, 0))


@pytest.mark.parametrize(("pairs", "asked"), SORTED)
def test_what_a_sort_asks_for_goes_by_the_card(
    pairs: tuple[int, int], asked: tuple[int, ...]
) -> None:
    count, key = pairs
    for capabilities, size in zip(CARDS, asked, strict=True):
        for capability in capabilities:
            tile = sort_tile(capability)
            assert sort_scratch_bytes(count, largest_key=key, tile=tile) == size + 1


def test_cards_that_sort_alike_share_a_tape() -> None:
    t = Tape(TapeOptions())
    assert t.sort_scratch_bytes(3100, largest_key=20000) == 55296
    assert t.runs_alike_on(TapeOptions(sort_tile=sort_tile((8, 0))))
    assert not t.runs_alike_on(TapeOptions(sort_tile=sort_tile((7, 0))))


def test_what_is_copied_first_goes_last() -> None:
    before, after = scratch_changes(behind_copy(512, (1024, ~0, RESULT, 2048)))
    assert [size for _, size in before] == [512, 1024, -1024]
    assert [size for _, size in after] == [2048, -2048, -512]
    assert behind_copy(512, ()) == (512, RESULT)


@pytest.mark.parametrize("name", ["t5-small", "qwen3-0.6b", "mixtral-8x7b"])
def test_a_tape_sorts_as_another_card_does(name: str) -> None:
    model = load_model(name)
    on_h100 = TapeOptions(batch_size=2, seq_len=2048, target_seq_len=2048)
    on_v100 = replace(on_h100, sort_tile=sort_tile((7, 0)), multiprocessors=80)
    exchanged = record_model(model, on_h100).as_on(on_v100)
    assert exchanged is not None
    assert scratch_of(exchanged) == scratch_of(record_model(model, on_v100))
    assert scratch_of(exchanged) != scratch_of(record_model(model, on_h100))


def scratch_of(t: Tape) -> list[tuple[int, ...]]:
    operations = [each for segment in t.segments for each in segment.operations]
    return [(*each.forward_scratch, RESULT, *each.backward_scratch) for each in operations]
