"""The minimum cut, against every cut of small networks."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.graph.mincut import FlowNetwork

NUM_NODES = 6
SOURCE, SINK = 0, NUM_NODES - 1
Edge = tuple[int, int, int]

edges = st.lists(
    st.tuples(
        st.integers(0, NUM_NODES - 1), st.integers(0, NUM_NODES - 1), st.integers(0, 9)
    ).filter(lambda edge: edge[0] != edge[1]),
    max_size=14,
)


def crossing(edges: list[Edge], behind: set[int]) -> int:
    return sum(size for start, end, size in edges if start not in behind and end in behind)


@given(edges)
def test_no_cut_is_smaller(edges: list[Edge]) -> None:
    network = FlowNetwork(NUM_NODES)
    for start, end, size in edges:
        network.connect(start, end, size)
    found = network.sink_side(SOURCE, SINK)
    assert SINK in found
    assert SOURCE not in found
    inner = [node for node in range(NUM_NODES) if node not in (SOURCE, SINK)]
    cuts = [
        {SINK, *(node for node, is_in in zip(inner, choice, strict=True) if is_in)}
        for choice in product((False, True), repeat=len(inner))
    ]
    least = min(crossing(edges, cut) for cut in cuts)
    assert crossing(edges, found) == least
    assert len(found) == min(len(cut) for cut in cuts if crossing(edges, cut) == least)


def test_what_cannot_be_cut_is_a_bug() -> None:
    network = FlowNetwork(2)
    network.connect(0, 1)
    with pytest.raises(AssertionError):
        network.sink_side(0, 1)
