"""Stages 1 and 2 cut one flat buffer: who has what of which parameter, written out and as sums."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.memory.deepspeed.partition import FlatBuffer
from memplan.memory.deepspeed.ranks import _buckets, _ranks_of


@dataclass(frozen=True)
class Weights:
    """Parameters by their elements."""

    numels: list[int]
    trainable: list[bool]


def buffer(
    *numels: int, num_ranks: int, frozen: tuple[int, ...] = (), dealt: bool = False
) -> FlatBuffer:
    trainable = [index not in frozen for index in range(len(numels))]
    return FlatBuffer(Weights(list(numels), trainable), num_ranks=num_ranks, round_robin=dealt)


def test_parts_begin_where_parameters_do_not() -> None:
    found = buffer(15, 20, 4, num_ranks=4)
    # 39 elements are padded to two for each of four ranks: parts of ten.
    assert (found.numel, found.size, found.offsets) == (40, 10, [0, 15, 35])
    assert (found.first_rank, found.last_rank) == ([0, 1, 3], [1, 3, 3])
    assert [found.cuts(index) for index in range(3)] == [[10, 5], [5, 10, 5], [4]]
    kinds = [(kind.ranks, kind.slices, kind.whole_numel) for kind in found.every_rank]
    assert kinds == [
        (range(1), ((0, 10),), 15),
        (range(1, 2), ((0, 5), (1, 5)), 35),
        (range(2, 3), ((1, 10),), 20),
        (range(3, 4), ((1, 5), (2, 4)), 24),
    ]
    assert [_ranks_of(each, found) for each in ([0], [1], [2], [0, 2])] == [
        range(2), range(1, 4), range(3, 4), range(4),
    ]  # fmt: skip


def test_what_is_frozen_is_not_in_it_and_some_ranks_have_padding_alone() -> None:
    found = buffer(3, 100, 2, num_ranks=4, frozen=(1,))
    assert (found.numel, found.size, found.order) == (8, 2, [0, 2])
    assert (found.first_rank, found.last_rank) == ([0, -1, 1], [1, -1, 2])
    last = found.every_rank[-1]
    assert (last.ranks, last.slices, last.whole_numel) == (range(3, 4), (), 0)
    assert found.kind_of(3) is last


def test_many_ranks_inside_one_parameter_are_told_at_once() -> None:
    found = buffer(1000, 24, num_ranks=64)
    assert [kind.ranks for kind in found.every_rank] == [
        range(1), range(1, 62), range(62, 63), range(63, 64),
    ]  # fmt: skip
    assert found.kind_of(40).slices == ((0, 16),)


@pytest.mark.parametrize("dealt", [False, True])
def test_every_element_has_one_rank(dealt: bool) -> None:
    chance = random.Random(5)
    for _ in range(200):
        numels = [chance.randint(1, 60) for _ in range(chance.randint(1, 9))]
        num_ranks = chance.randint(1, 12)
        frozen = tuple(index for index in range(len(numels)) if chance.random() < 0.2)
        found = buffer(*numels, num_ranks=num_ranks, frozen=frozen, dealt=dealt)
        trained = [index for index in range(len(numels)) if index not in frozen]
        assert sorted(found.order) == trained
        ranks = [rank for kind in found.every_rank for rank in kind.ranks]
        assert ranks == list(range(num_ranks))
        owned = dict.fromkeys(trained, 0)
        for kind in found.every_rank:
            assert sum(numel for _, numel in kind.slices) <= found.size
            assert kind.whole_numel == sum(numels[index] for index, _ in kind.slices)
            for index, numel in kind.slices:
                assert kind.ranks.stop - 1 in _ranks_of([index], found)
                owned[index] += numel * len(kind.ranks)
        assert owned == {index: numels[index] for index in trained}
        for index in trained:
            assert sum(found.cuts(index)) == numels[index]
            assert sum(numel for numel, _ in found.sums(index, 16)) == numels[index]


def test_a_bucket_that_is_full_to_the_last_element_is_summed_at_once() -> None:
    """Only what is larger than a bucket goes piece by piece (``reduce_independent_p_g_buckets_and_remove_grads`` of stage_1_and_2.py)."""
    options = SimpleNamespace(reduce_bucket_size=1024, reduce_scatter=True)
    job: Any = SimpleNamespace(weight_bytes=2, options=options)
    found = _buckets(job, buffer(512, 512, 1024, 1025, num_ranks=8), {3: 1, 2: 2, 1: 3, 0: 4})
    told = [
        (found[each].number, found[each].is_large, found[each].copied_bytes) for each in range(4)
    ]
    # Its parts on three ranks are more than the limit with the last of them, and make 2050 bytes, in whole blocks.
    assert told == [(2, False, 2048), (2, False, 2048), (1, False, 2048), (0, True, 2560)]
