"""Stage 3's gathered parameters as blocks of a ledger (runtime/zero/partitioned_param_coordinator.py)."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

from memplan.memory.account import ComponentKind
from memplan.memory.deepspeed.coordinator import Coordinator, FetchSettings, Handle, Visited
from memplan.memory.deepspeed.job import rounded
from memplan.memory.deepspeed.layers import Layers
from memplan.memory.deepspeed.partition import shard_numel
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks

_BUFFERS, _GATHERED = ComponentKind.COMMUNICATION_BUFFERS, ComponentKind.GATHERED_PARAMETERS


MOST_COMPARED = 1000
"""Parameters that are gathered or waited for at once: with more each layer would take as long to look at as it takes to play."""


class PlayedCoordinator(Coordinator):
    """The coordinator, with its gathered parameters in a ledger.

    What a first pass fetches becomes the trace of all later ones.
    """

    def __init__(
        self,
        settings: FetchSettings,
        numels: Sequence[int],
        ledger: Ledger,
        *,
        stream: int,
        persistent: frozenset[int],
        sealed: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(settings, numels, [], sealed=sealed)
        self.ledger = ledger
        self.stream = stream
        self.hiding = Hiding.AHEAD if stream else Hiding.NONE
        self.ranks = Ranks(settings.num_ranks)
        self.persistent = persistent
        self.blocks: dict[int, Block] = {}
        self.flat: dict[Handle, Block] = {}
        self.recorded: list[Sequence[int]] = []
        self.has_trace = False
        self.is_recording = False
        self.is_detaching = False
        """What is let go stays alive as long as the graph needs it."""
        self.detached: dict[int, list[Block]] = {}
        self.second_shard: Callable[[int], Block] | None = None
        """Makes a parameter's shard of the second set; None: there is one set alone."""
        self.second: dict[int, Block] = {}
        """Those that there are."""
        self.second_ranks = self.ranks
        """Who have the second set among them."""
        self.registered: dict[int, None] = {}
        """Parameters that modules are known to read of others."""
        self.begun_at: dict[int, tuple[int, int, int]] = {}
        """With which step each layer of the present pass began, and how many had been recorded and registered."""

    def standing(self) -> object:
        """What is gathered and on its way, to be compared."""
        on_way = {
            weight: (tuple(each.members), each.flat_bytes, each.copied, each.waiting)
            for weight, each in self.handles.items()
        }
        counts = bool(self.recorded), len(self.detached), len(self.second)
        return dict(self.sizes), dict(self.blocks), on_way, counts

    def restart(self) -> None:
        """``reset_step``: a forward pass begins."""
        self.active.clear()
        for weight in list(self.handles):
            self._wait(weight)
            self.drop(weight)
        self.has_trace = bool(self.recorded)
        self.is_recording = not self.has_trace
        self.begin(self.recorded)

    def visit(self, needed: Visited) -> None:
        """A module is about to run."""
        if needed.external:
            self.active |= self.registered.keys() & needed.external
        if self.has_trace and self.step == len(self.trace):
            self._forget_trace()
        if self.has_trace:
            self.enter()
            return
        if self.is_recording:
            self.recorded.append(needed)
        others = set(needed.external) - self.registered.keys()
        self._bring_own([each for each in needed if each not in others] if others else needed)

    def read(self, weight: int) -> None:
        """A module reads a weight of another by itself: it comes on the main stream, and is fetched with it from now on
        (``ZeROOrderedDict.__getitem__``, runtime/zero/parameter_offload.py)."""
        if weight not in self.sizes:
            self.registered[weight] = None
            self._keep(weight, "parameters gathered where another module reads them")

    def _forget_trace(self) -> None:
        """``_invalidate_trace``: a backward pass, where a forward one alone was recorded.

        The next pass records anew.
        """
        for weight in list(self.handles):
            self._wait(weight)
            self.drop(weight)
        self.recorded = []
        self.has_trace = False

    def returned(self, module: Visited) -> None:
        """It holds nothing of others any more."""
        self.active.difference_update(module.external)

    def leave(self, weights: Sequence[int]) -> None:
        """A module has run."""
        if not weights:
            return
        if self.has_trace:
            self.release([weight for weight in weights if weight not in self.persistent])
            return
        for weight in weights:
            if weight in self.sizes and weight not in self.active:
                self.drop(weight)

    def let_go(self, weights: Sequence[int]) -> None:
        """Whatever the trace says of them."""
        for weight in weights:
            if weight in self.handles:
                self._wait(weight)
            if weight in self.sizes:
                self.drop(weight)

    def detach(self, weights: Sequence[int]) -> None:
        """A module has run again; its backward pass holds its parameters."""
        self.is_detaching = True
        self.leave(weights)
        self.is_detaching = False

    def free_detached(self, weight: int) -> None:
        """The backward pass is done with it."""
        for block in self.detached.pop(weight, ()):
            self.ledger.free(block)

    def free_newest(self, weight: int) -> None:
        """The backward pass of the last call that is left is done with what it read."""
        held = self.detached.get(weight)
        if held:
            self.ledger.free(held.pop())
            if not held:
                del self.detached[weight]

    def keep(self, weights: Sequence[int]) -> None:
        """Gather what stays, one by one, on the main stream."""
        for weight in weights:
            if weight not in self.sizes:
                name = "small parameters that stay gathered (stage3_param_persistence_threshold)"
                self._keep(weight, name)

    def _keep(self, weight: int, name: str) -> None:
        size = self._padded_bytes(self.numels[weight])
        super().hold(weight, size)
        self._send(size, [weight])
        self.blocks[weight] = self.ledger.allocate(size, 0, _GATHERED, name)

    def hold(self, weight: int, num_bytes: int) -> None:
        """Made on the stream of the all-gathers."""
        super().hold(weight, num_bytes)
        name = "gathered parameters"
        self.blocks[weight] = self.ledger.allocate(num_bytes, self.stream, _GATHERED, name)
        if weight not in self.handles:
            self._bring([weight])
            self._send(num_bytes, [weight])

    def drop(self, weight: int) -> None:
        """Free it; before, where there is a second set of shards without it, this rank's is cut off."""
        super().drop(weight)
        self.cut_second(weight)
        block = self.blocks.pop(weight)
        if self.is_detaching:
            self.detached.setdefault(weight, []).append(block)
        else:
            self.ledger.free(block)

    def cut_second(self, weight: int) -> None:
        """``_partition_param_sec``: the shard is made where it is missing."""
        if self.second_shard is not None and weight not in self.second:
            self.second[weight] = self.second_shard(weight)

    def let_second_go(self) -> None:
        """The weights have changed (``invalidate_secondary_tensor``)."""
        for weight in sorted(self.second):
            self.ledger.free(self.second[weight])
        self.second.clear()

    def hold_flat(self, handle: Handle) -> None:
        """The buffer, then the shards that are joined into this rank's part of it."""
        size, name = handle.flat_bytes, "flat buffers that gathered parameters come in"
        self.flat[handle] = self.ledger.allocate(size, self.stream, _GATHERED, name)
        self._bring(handle.members)
        self._send(size, handle.members)
        # The shards are joined, and what arrives is copied out parameter by parameter.
        self.ledger.exchange(ExchangeKind.COPY, 2 * size)

    def drop_flat(self, handle: Handle) -> None:
        """Free it."""
        self.ledger.free(self.flat.pop(handle))

    def _send(self, num_bytes: int, weights: Sequence[int]) -> None:
        """An all-gather, and where the shards are on the CPU or on NVMe their way to the GPU first.

        Among those that share the second set once it is there: from the first pass forward on, until the weights change
        (``use_secondary_tensor``, runtime/zero/partition_parameters.py).
        """
        has_second = bool(self.second) and all(weight in self.second for weight in weights)
        hiding, ranks = self.hiding, self.second_ranks if has_second else self.ranks
        if self.settings.offloaded:
            shard = num_bytes // self.settings.num_ranks
            if self.settings.swapped:
                read = int(self.settings.swapped * shard)
                self.ledger.exchange(ExchangeKind.FROM_STORAGE, read, hiding=hiding)
            self.ledger.exchange(ExchangeKind.TO_GPU, shard, hiding=hiding)
        if self.settings.num_ranks > 1:
            self.ledger.exchange(ExchangeKind.ALL_GATHER, num_bytes, ranks, hiding)

    def _bring(self, weights: Sequence[int]) -> None:
        """Shards from the CPU."""
        settings = self.settings
        if settings.offloaded and settings.num_ranks > 1:
            shards = [shard_numel(self.numels[each], settings.num_ranks) for each in weights]
            sizes = [rounded(shard * settings.weight_bytes) for shard in shards]
            name = "shards from the CPU"
            self.ledger.use(*sizes, stream=self.stream, kind=_BUFFERS, name=name)

    # -- layers that are alike -------------------------------------------------------------------

    @property
    def _staying(self) -> frozenset[int]:
        """What no module lets go of."""
        return self.persistent if self.has_trace else frozenset()

    def standing_at(self, layers: Layers) -> Hashable:
        """All that later decisions depend on, seen from a layer; None where some of what stays is yet to come,
        or where it is too much."""
        self.begun_at[layers.copy] = self.step, len(self.recorded), len(self.registered)
        if max(len(self.sizes), self.head - self.starts[self.step]) > MOST_COMPARED:
            return None
        place, stays = layers.place, self._staying
        gathered = frozenset(
            (place(weight), size, self.blocks.get(weight))
            for weight, size in self.sizes.items()
            if weight not in stays
        )
        if len(gathered) + len(stays) != len(self.sizes):
            return None
        on_way = frozenset(
            (place(weight), *map(place, each.members), each.flat_bytes, each.copied, each.waiting)
            for weight, each in self.handles.items()
        )
        passed = frozenset((place(each), step - self.step) for each, step in self.passed.items())
        detached = frozenset((place(each), *blocks) for each, blocks in self.detached.items())
        ahead = self.head - self.starts[self.step]
        # What is available decides what is looked ahead to, where there is a trace.
        available = self.available if self.has_trace else None
        return gathered, on_way, passed, detached, ahead, available

    def skip_turns(self, layers: Layers, turn: int, times: int) -> int:
        """Stand as after so many more turns of layers, or as many of them as are alike."""
        step, num_recorded, num_registered = self.begun_at[layers.copy - turn]
        steps = self.step - step
        if steps:
            # One more is left to be looked at.
            times = max(0, self._num_alike(layers, turn, steps, times + 1) - 1)
        told = self.recorded[num_recorded:] if self.is_recording else ()
        read = list(self.registered)[num_registered:]
        for count in range(1, times + 1):
            self.registered.update(dict.fromkeys(layers.all_moved(read, turn * count)))
            self.recorded += [_moved(needed, layers, turn * count) for needed in told]
        self._move(layers, turn * times, steps * times)
        return times

    def _num_alike(self, layers: Layers, turn: int, steps: int, times: int) -> int:
        """How many turns the trace goes on alike, with what is looked ahead to from the last, and lets as much go."""
        trace, step = self.trace, self.step
        last = trace[step - steps : step]
        last_ahead = self.queue[self.head][1] if self.head < len(self.queue) else len(trace)
        beyond = (last_ahead - step) // steps + 1
        if not self._is_let_go(last, step):
            return 0
        while times:
            far = times + beyond
            seen = trace[step + (far - 1) * steps : step + far * steps]
            own = [_moved(needed, layers, turn * times) for needed in last]
            if seen == [_moved(needed, layers, turn * far) for needed in last] and (
                self._is_let_go(own, step + times * steps)
            ):
                break
            times -= 1
        return times

    def _is_let_go(self, needed: Sequence[Sequence[int]], step: int) -> bool:
        """Whether none of these is needed soon after that step."""
        for weight in {weight for each in needed for weight in each} - self.persistent:
            uses = self.uses[weight]
            place = bisect_left(uses, step)
            if place < len(uses) and self.is_near(weight, step, uses[place]):
                return False
        return True

    def _move(self, layers: Layers, copies: int, steps: int) -> None:
        """All that is held of the layers is of others, so many layers and steps on."""
        stays = self._staying

        def moved(weight: int) -> int:
            return weight if weight in stays else layers.moved(weight, copies)

        self.sizes = {moved(weight): size for weight, size in self.sizes.items()}
        self.blocks = {moved(weight): block for weight, block in self.blocks.items()}
        self.detached = {moved(weight): blocks for weight, blocks in self.detached.items()}
        for each in set(self.handles.values()):
            each.members = [moved(weight) for weight in each.members]
        self.handles = {moved(weight): each for weight, each in self.handles.items()}
        passed = self.passed
        self.head += self.starts[self.step + steps] - self.starts[self.step]
        self.step += steps
        for weight in passed:
            self.fetched_for[weight] = -1
        for weight, step in passed.items():
            self.fetched_for[layers.moved(weight, copies)] = step + steps


def _moved(needed: Sequence[int], layers: Layers, copies: int) -> list[int]:
    found = layers.all_moved(needed, copies)
    if isinstance(needed, Visited):
        moved = layers.all_moved
        return Visited(found, moved(needed.inside, copies), moved(needed.external, copies))
    return found
