"""Stage 3's fetching, prefetching and releasing of parameters.

A replay of ``runtime/zero/partitioned_param_coordinator.py`` with a complete trace, as from the
third pass on. A module's fetch waits for its own parameters, then starts gathering the ones that
the trace needs next, up to ``prefetch_bucket_size`` elements, while no more than
``max_live_parameters`` are gathered. While it looks for them it passes over parameters that are still
there, and those are then not released before that use: this, more than ``max_reuse_distance``, is
what keeps gathered parameters across the turn from forward to backward.

Several parameters gathered at once come in one flat buffer and are then copied out one by one; the
buffer lives until the module of the last of them has run.
"""

from collections.abc import Collection, Iterable, Sequence

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.partition import shard_numel


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSettings:
    """What the coordinator goes by; sizes in elements."""

    num_ranks: int
    weight_bytes: int
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int
    sequential: bool
    """``stage3_allgather_sequential``: no flat buffers."""
    offloaded: bool
    """The shards are in CPU memory."""
    swapped: float = 0.0
    """And this share of them on NVMe."""

    @property
    def gathers(self) -> bool:
        """On one rank a parameter is a view of its shard, unless that is on the CPU."""
        return self.num_ranks > 1 or self.offloaded


class Visited(list[int]):
    """The parameters that a module is fetched with."""

    __slots__ = ("external", "inside")

    def __init__(
        self, own: Iterable[int], inside: Collection[int], external: Collection[int] = ()
    ) -> None:
        super().__init__(own)
        self.inside = inside
        """Of it and the modules within it."""
        self.external = external
        """Those that are not its own: it reads them by itself."""


class Handle:
    """One all-gather under way."""

    __slots__ = ("copied", "flat_bytes", "members", "waiting")

    def __init__(self, members: list[int], flat_bytes: int) -> None:
        self.members = members
        self.flat_bytes = flat_bytes
        self.copied = flat_bytes == 0
        self.waiting = len(members)


class Coordinator:
    """Which parameters are gathered; what that takes is for who overrides the last methods to say."""

    def __init__(
        self,
        settings: FetchSettings,
        numels: Sequence[int],
        trace: Sequence[Sequence[int]],
        *,
        sealed: frozenset[int] = frozenset(),
    ) -> None:
        self.settings = settings
        self.numels = numels
        self.sealed = sealed
        """Parameters of modules that are taken as a whole. What such a module is let go for is looked for in modules
        and all that is in them, what another is in each module's own (``__params_to_release``, ``recurse``)."""
        self.sizes: dict[int, int] = {}
        """Bytes of each gathered parameter; 0 while it is in a flat buffer only."""
        self.handles: dict[int, Handle] = {}
        self.trace: Sequence[Sequence[int]] = ()
        """For each step, the parameters of the module that runs, in order."""
        self.num_known = -1
        """How many steps of it have been looked at."""
        self.active: set[int] = set()
        """What a module that is running reads of others, which these do not let go of (``ds_active_sub_modules``)."""
        self.begin(trace)

    def begin(self, trace: Sequence[Sequence[int]]) -> None:
        """Forward and backward of a micro-batch begin."""
        self.step = 0
        self.available = 0
        """Elements gathered, as the engine counts them."""
        self.fetched_for = [-1] * len(self.numels)
        """The last step that a parameter has been fetched for, or passed over for."""
        self.head = 0
        if trace is not self.trace or len(trace) != self.num_known:
            self.trace, self.num_known = trace, len(trace)
            self._look_at_trace()
        self.next_use = dict.fromkeys(self.uses, 0)

    def _look_at_trace(self) -> None:
        self.queue = [(weight, step) for step, needed in enumerate(self.trace) for weight in needed]
        self.starts = [0]
        """Where in the queue each step begins."""
        self.traversed = [0]
        """Elements of all steps before each one, but for sealed modules'."""
        self.uses: dict[int, list[int]] = {}
        """The steps that need each parameter."""
        for step, needed in enumerate(self.trace):
            total = self.traversed[-1]
            for weight in needed:
                total += 0 if weight in self.sealed else self.numels[weight]
                self.uses.setdefault(weight, []).append(step)
            self.traversed.append(total)
            self.starts.append(self.starts[-1] + len(needed))

    def enter(self) -> None:
        """The module of the present step is about to run."""
        needed = self.trace[self.step]
        if needed:
            self._fetch(needed)
        limit = self.settings.max_live_parameters - self.available
        if limit > 0 and self.head < len(self.queue):
            self._prefetch(min(limit, self.settings.prefetch_bucket_size))
        self.step += 1

    def _fetch(self, needed: Sequence[int]) -> None:
        """Wait for the module's own parameters, and take them off the queue."""
        self._bring_own(needed)
        fetched_for, step = self.fetched_for, self.step
        num_own = sum([1 for weight in needed if fetched_for[weight] < step])
        if num_own:
            for weight, last_step in self.queue[self.head : self.head + num_own]:
                fetched_for[weight] = last_step
            self.head += num_own

    def _bring_own(self, needed: Sequence[int]) -> None:
        """Gather what is not there, and wait for all of it."""
        missing = [weight for weight in needed if weight not in self.sizes]
        if missing:
            self._gather(missing)
        for weight in needed:
            if weight in self.handles:
                self._wait(weight)

    def _prefetch(self, limit: int) -> None:
        """Start gathering what comes next, until there are ``limit`` elements."""
        fetched_for, queue, sizes = self.fetched_for, self.queue, self.sizes
        found: list[int] = []
        numel = 0
        head, count = self.head, len(queue)
        while numel < limit and head < count:
            weight, step = queue[head]
            head += 1
            fetched_for[weight] = max(fetched_for[weight], step)
            if weight not in sizes and weight not in found:
                found.append(weight)
                numel += self.numels[weight]
        self.head = head
        if found:
            self._gather(found)

    def release(self, weights: Sequence[int]) -> None:
        """A module is done: let go what is not needed soon."""
        step, fetched_for = self.step, self.fetched_for
        for weight in weights:
            if (
                fetched_for[weight] < step
                and weight in self.sizes
                and weight not in self.active
                and not self._is_used_soon(weight, step)
            ):
                self.drop(weight)
                self.available -= self.numels[weight]

    def _is_used_soon(self, weight: int, step: int) -> bool:
        """Whether less than ``max_reuse_distance`` lies before the next use."""
        uses = self.uses[weight]
        place = self.next_use[weight]
        while place < len(uses) and uses[place] < step:
            place += 1
        self.next_use[weight] = place
        return place < len(uses) and self.is_near(weight, step, uses[place])

    def is_near(self, weight: int, step: int, use: int) -> bool:
        """Whether less than ``max_reuse_distance`` lies between a step and a later use."""
        limit = self.settings.max_reuse_distance
        if weight not in self.sealed:
            return self.traversed[use] - self.traversed[step] < limit
        traversed = 0
        for needed in self.trace[step : use + 1]:
            if traversed >= limit:
                return False
            assert isinstance(needed, Visited)
            if weight in needed.inside:
                return True
            traversed += sum(map(self.numels.__getitem__, needed.inside))
        return False

    @property
    def passed(self) -> dict[int, int]:
        """What has been fetched for the present step or a later one, or passed over for it, with that step."""
        fetched_for, step = self.fetched_for, self.step
        ahead = self.queue[self.starts[step] : self.head]
        return {weight: fetched_for[weight] for weight, _ in ahead if fetched_for[weight] >= step}

    def _gather(self, weights: list[int]) -> None:
        settings = self.settings
        self.available += sum(self.numels[weight] for weight in weights)
        if settings.num_ranks == 1 or settings.sequential or len(weights) == 1:
            for weight in weights:
                self.hold(weight, self._padded_bytes(self.numels[weight]))
        else:
            padded = sum(shard_numel(self.numels[weight], settings.num_ranks) for weight in weights)
            handle = Handle(sorted(weights), self._padded_bytes(padded * settings.num_ranks))
            self.hold_flat(handle)
            for weight in weights:
                self.sizes[weight] = 0
                self.handles[weight] = handle

    def _wait(self, weight: int) -> None:
        handle = self.handles.pop(weight)
        if not handle.copied:
            handle.copied = True
            for member in handle.members:
                self.hold(member, _rounded(self.numels[member] * self.settings.weight_bytes))
        handle.waiting -= 1
        if not handle.waiting:
            self.drop_flat(handle)

    # -- memory ----------------------------------------------------------------------------------

    def hold(self, weight: int, num_bytes: int) -> None:
        """A gathered parameter has memory of its own."""
        self.sizes[weight] = num_bytes

    def drop(self, weight: int) -> None:
        """It goes."""
        del self.sizes[weight]

    def hold_flat(self, handle: Handle) -> None:
        """Several parameters arrive in one buffer."""

    def drop_flat(self, handle: Handle) -> None:
        """It goes with the last of them."""

    def _padded_bytes(self, numel: int) -> int:
        ranks = self.settings.num_ranks
        return _rounded(shard_numel(numel, ranks) * ranks * self.settings.weight_bytes)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
