"""What an engine's exchanges take, pass by pass; setups that exchange the same share it.

A sweep asks for the time of many batches of one engine, whose programs exchange the same whatever the
batch: what these take is added up once.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from memplan.compute.lanes import Lane
from memplan.compute.links import collective_seconds
from memplan.compute.rates import UPDATE_SHARE, Rates
from memplan.hardware.network import STORAGE_BYTES_PER_S, Network
from memplan.training.splitting.exchange import Exchange, ExchangeKind, Hiding, Visit

_MOVED = frozenset({ExchangeKind.COPY, ExchangeKind.UPDATE})
"""In the GPU's own memory."""
_TO_HOST = frozenset({ExchangeKind.TO_GPU, ExchangeKind.TO_HOST})
_IN_TURN = frozenset({ExchangeKind.TO_GPU_IN_TURN, ExchangeKind.TO_HOST_IN_TURN})
_STORAGE = frozenset({ExchangeKind.FROM_STORAGE, ExchangeKind.TO_STORAGE})
_ON_HOST = _TO_HOST | _IN_TURN | _STORAGE | {ExchangeKind.HOST_UPDATE, ExchangeKind.TO_GPU_PAGEABLE}
REMEMBERED = 4096
"""Passes: more than a sweep meets between two of the same kind."""


class Beside(NamedTuple):
    """What an engine exchanges while a segment runs, all repetitions together [s]."""

    copied_s: float = 0.0
    blocking_s: float = 0.0
    ahead_s: float = 0.0
    behind_s: float = 0.0
    fetched_s: float = 0.0
    stored_s: float = 0.0
    waited_s: float = 0.0
    """For the host."""


NOTHING = Beside()


class Exchanging(NamedTuple):
    """One thing of an optimizer's step, all of its kind together."""

    lane: Lane
    seconds: float
    words: str
    hiding: Hiding = Hiding.NONE
    """Of what the CPUs do: beside the last backward pass (behind), or beside the next step (ahead)."""


def beside_segments(visit: Visit, network: Network, rates: Rates) -> Mapping[int, Beside]:
    """What a pass exchanges, by the number of the segment that runs; remembered."""
    return _beside_segments(_Same(visit), network, rates)


def exchanged_apart(visit: Visit, network: Network, rates: Rates) -> tuple[Exchanging, ...]:
    """What a part of a step exchanges where nothing computes beside it, in order; remembered."""
    return _exchanged_apart(_Same(visit), network, rates)


class _Same:
    """A visit that is told apart by itself: it is long to tell from another."""

    __slots__ = ("visit",)

    def __init__(self, visit: Visit) -> None:
        self.visit = visit

    def __hash__(self) -> int:
        return id(self.visit)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.visit is self.visit


@lru_cache(maxsize=REMEMBERED)
def _beside_segments(same: _Same, network: Network, rates: Rates) -> Mapping[int, Beside]:
    sums: dict[int, list[float]] = {}
    for exchange, count in same.visit.exchanges:
        found = sums.get(exchange.segment)
        if found is None:
            found = sums[exchange.segment] = [0.0] * len(NOTHING)
        found[_place(exchange, network)] += count * exchange_seconds(exchange, network, rates)
    return {segment: Beside(*found) for segment, found in sums.items()}


@lru_cache(maxsize=REMEMBERED)
def _exchanged_apart(same: _Same, network: Network, rates: Rates) -> tuple[Exchanging, ...]:
    return tuple(
        Exchanging(
            _lane(exchange),
            count * exchange_seconds(exchange, network, rates),
            exchange.kind.value,
            exchange.hiding if exchange.kind is ExchangeKind.HOST_UPDATE else Hiding.NONE,
        )
        for exchange, count in same.visit.exchanges
    )


def exchange_seconds(exchange: Exchange, network: Network, rates: Rates) -> float:
    """One exchange by itself [s]."""
    kind = exchange.kind
    if kind is ExchangeKind.COPY:
        return exchange.num_bytes / rates.bytes_per_s
    if kind is ExchangeKind.UPDATE:
        return exchange.num_bytes / (UPDATE_SHARE * rates.bytes_per_s)
    if kind in _TO_HOST:
        return exchange.num_bytes / network.to_host
    if kind in _IN_TURN:
        return exchange.num_bytes / network.to_host_alone
    if kind is ExchangeKind.TO_GPU_PAGEABLE:
        return exchange.num_bytes / network.to_host_pageable
    if kind in _STORAGE:
        return exchange.num_bytes / STORAGE_BYTES_PER_S
    if kind is ExchangeKind.HOST_UPDATE:
        return exchange.num_bytes * network.gpus_per_node / network.host_memory
    return collective_seconds(kind, exchange.num_bytes, exchange.ranks, network)


def _lane(exchange: Exchange) -> Lane:
    if exchange.kind in _MOVED:
        return Lane.COMPUTE
    return Lane.HOST if exchange.kind in _ON_HOST else Lane.LINK


def _place(exchange: Exchange, network: Network) -> int:
    """Which field of ``Beside`` counts it."""
    if exchange.kind in _MOVED:
        return 0
    if exchange.kind in _ON_HOST:
        hiding = exchange.hiding if network.is_pinned else Hiding.NONE
        return _HOST_PLACES[hiding]
    return _LINK_PLACES[exchange.hiding]


_LINK_PLACES = {Hiding.NONE: 1, Hiding.AHEAD: 2, Hiding.BEHIND: 3}
_HOST_PLACES = {Hiding.NONE: 6, Hiding.AHEAD: 4, Hiding.BEHIND: 5}
