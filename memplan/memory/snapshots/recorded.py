"""A memory snapshot as torch writes one, read: what was alive when, and what the fullest moment held.

A recording may begin in the middle of a run: what was there before shows where it is freed, or in the
segments that are left at the end. Levels count blocks as they were asked for, each rounded up to
``ALLOCATION_ROUNDING``; what the allocator hands out beyond that is part of what it reserves.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from memplan.errors import InputError
from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.snapshots.snapshot import OWN_FILE
from memplan.text import shown
from memplan.units import round_up

MAX_BYTES = 1 << 50
"""What no block of memory is larger than, nor the number of an address far above."""
MAX_ADDRESS = 1 << 64


class RunPart(StrEnum):
    """What a run does at a time, as far as frames tell."""

    LOAD = "load"
    """Before the first forward pass."""
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    name: str


Stack = tuple[Frame, ...]
"""Frames, the innermost first."""


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """A block and the stack that asked for it."""

    num_bytes: int
    """Rounded up to ``ALLOCATION_ROUNDING``."""
    stack: Stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What a snapshot tells of one device's run."""

    device: int
    num_events: int
    allocated_bytes: int
    """The most that was alive."""
    reserved_bytes: int
    """The most that the allocator held."""
    part_bytes: Mapping[RunPart, int]
    """The most that was alive in each part of the run that frames tell apart."""
    alive: tuple[RecordedBlock, ...]
    """The blocks of the fullest moment."""
    earlier_bytes: int
    """What was there before the recording began."""


def read_recording(snapshot: object, *, source: str) -> Recording:
    """Follow a snapshot's events.

    ``source`` is its file, for messages. Raises ``InputError`` for another form, naming the place.
    """
    if not isinstance(snapshot, Mapping):
        msg = f"{source}: expected a memory snapshot, a dict with device_traces, got {shown(snapshot)}"
        raise InputError(msg)
    traces = _rows(snapshot, "device_traces", source)
    lengths = [len(_list(trace, f"{source}: device_traces[{n}]")) for n, trace in enumerate(traces)]
    device = max(range(len(lengths)), key=lambda n: lengths[n], default=0)
    if not any(lengths):
        msg = (
            f"{source}: device_traces: no events were recorded: call "
            "torch.cuda.memory._record_memory_history() before the model is made"
        )
        raise InputError(msg)
    reader = _Reader(source=source, device=device)
    segments = reader.segments(_rows(snapshot, "segments", source))
    events = reader.events(traces[device])
    return _follow(events, segments, device=device)


@dataclass(frozen=True, slots=True)
class _Event:
    action: str
    address: int
    num_bytes: int
    stack: Stack


@dataclass(frozen=True, slots=True)
class _Left:
    """What is there at the end."""

    reserved_bytes: int
    blocks: dict[int, RecordedBlock]


_ACTIONS = frozenset(
    {
        "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
        "segment_unmap",
    }
)  # fmt: skip
"""Those that move a level; others (``oom``, ``snapshot``, ``workspace_snapshot``) do not."""


class _Reader:
    """Reads rows of one device, each value checked."""

    def __init__(self, *, source: str, device: int) -> None:
        self.source = source
        self.device = device
        self.stacks: dict[int, Stack] = {}
        """Stacks by the identity of the list that they were read from."""
        self.frames: dict[Frame, Frame] = {}

    def segments(self, rows: Sequence[object]) -> _Left:
        reserved = 0
        blocks: dict[int, RecordedBlock] = {}
        for number, row in enumerate(rows):
            place = f"{self.source}: segments[{number}]"
            segment = _mapping(row, place)
            if segment.get("device", 0) != self.device:
                continue
            reserved += _number(segment, "total_size", place)
            address = _number(segment, "address", place, limit=MAX_ADDRESS)
            for index, each in enumerate(_rows(segment, "blocks", place)):
                at = f"{place}.blocks[{index}]"
                block = _mapping(each, at)
                if block.get("state") == "active_allocated":
                    own = address
                    if "address" in block:
                        own = _number(block, "address", at, limit=MAX_ADDRESS)
                    asked = "requested_size" if "requested_size" in block else "size"
                    size = _number(block, asked, at)
                    blocks[own] = RecordedBlock(_rounded(size), self.stack(block, at))
                address += _number(block, "size", at)
        return _Left(reserved, blocks)

    def events(self, rows: object) -> list[_Event]:
        place = f"{self.source}: device_traces[{self.device}]"
        found = []
        for number, row in enumerate(_list(rows, place)):
            at = f"{place}[{number}]"
            entry = _mapping(row, at)
            action = entry.get("action")
            if not isinstance(action, str):
                msg = f"{at}.action: expected text, got {shown(action)}"
                raise InputError(msg)
            if action in _ACTIONS:
                address = _number(entry, "addr", at, limit=MAX_ADDRESS)
                size = _number(entry, "size", at)
                found.append(_Event(action, address, size, self.stack(entry, at)))
        return found

    def stack(self, row: Mapping[str, object], place: str) -> Stack:
        frames = row.get("frames", [])
        known = self.stacks.get(id(frames))
        if known is None:
            rows = _list(frames, f"{place}.frames")
            known = tuple(
                self.frame(each, f"{place}.frames[{index}]") for index, each in enumerate(rows)
            )
            self.stacks[id(frames)] = known
        return known

    def frame(self, row: object, place: str) -> Frame:
        found = _mapping(row, place)
        file, name = found.get("filename"), found.get("name")
        if not isinstance(file, str) or not isinstance(name, str):
            msg = f"{place}: expected filename and name as text, got {shown(found)}"
            raise InputError(msg)
        frame = Frame(file, _number(found, "line", place), name)
        return self.frames.setdefault(frame, frame)


def _rows(row: Mapping[str, object], key: str, place: str) -> Sequence[object]:
    if key not in row:
        msg = f"{place}: {key}: is missing; expected what torch.cuda.memory._dump_snapshot writes"
        raise InputError(msg)
    return _list(row[key], f"{place}: {key}")


def _list(value: object, place: str) -> Sequence[object]:
    if not isinstance(value, list):
        msg = f"{place}: expected a list, got {shown(value)}"
        raise InputError(msg)
    return value


def _mapping(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        msg = f"{place}: expected a dict, got {shown(value)}"
        raise InputError(msg)
    return value


def _number(row: Mapping[str, object], key: str, place: str, *, limit: int = MAX_BYTES) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        msg = f"{place}.{key}: expected a whole number from 0 up, got {shown(value)}"
        raise InputError(msg)
    return value


def _rounded(num_bytes: int) -> int:
    return round_up(num_bytes, ALLOCATION_ROUNDING)


_GAINS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""What an event does to what is reserved."""


def _follow(events: Sequence[_Event], left: _Left, *, device: int) -> Recording:
    earlier = _before(events, left)
    alive = dict(earlier)
    reserved = left.reserved_bytes - sum(
        _GAINS[event.action] * event.num_bytes for event in events if event.action in _GAINS
    )
    level = peak = sum(block.num_bytes for block in alive.values())
    peak_reserved = reserved
    peak_at = -1
    parts: dict[RunPart, int] = {}
    has_stacks = any(event.stack for event in events)
    part = RunPart.LOAD
    for number, event in enumerate(events):
        if event.action == "alloc":
            block = RecordedBlock(_rounded(event.num_bytes), event.stack)
            gone = alive.pop(event.address, None)
            level += block.num_bytes - (0 if gone is None else gone.num_bytes)
            alive[event.address] = block
            if has_stacks:
                part = part_of(event.stack, part)
                parts[part] = max(parts.get(part, 0), level)
            if level > peak:
                peak, peak_at = level, number
        elif event.action == "free_requested":
            gone = alive.pop(event.address, None)
            level -= 0 if gone is None else gone.num_bytes
        elif event.action in _GAINS:
            reserved += _GAINS[event.action] * event.num_bytes
            peak_reserved = max(peak_reserved, reserved)
    return Recording(
        device=device,
        num_events=len(events),
        allocated_bytes=peak,
        reserved_bytes=max(peak_reserved, peak),
        part_bytes=parts,
        alive=_alive_after(events[: peak_at + 1], earlier),
        earlier_bytes=sum(block.num_bytes for block in earlier.values()),
    )


def _before(events: Sequence[_Event], left: _Left) -> dict[int, RecordedBlock]:
    """Blocks of which the recording does not see the beginning."""
    seen: set[int] = set()
    found: dict[int, RecordedBlock] = {}
    for event in events:
        if event.action == "alloc":
            seen.add(event.address)
        elif event.action == "free_requested":
            if event.address not in seen:
                found[event.address] = RecordedBlock(_rounded(event.num_bytes), ())
            seen.add(event.address)
    for address, block in left.blocks.items():
        if address not in seen:
            found[address] = block
    return found


def _alive_after(
    events: Iterable[_Event], earlier: dict[int, RecordedBlock]
) -> tuple[RecordedBlock, ...]:
    alive = dict(earlier)
    for event in events:
        if event.action == "alloc":
            alive[event.address] = RecordedBlock(_rounded(event.num_bytes), event.stack)
        elif event.action == "free_requested":
            alive.pop(event.address, None)
    return tuple(alive.values())


def part_of(stack: Stack, before: RunPart) -> RunPart:
    """Which part of a run asks for a block, as its stack tells; ``before`` where it does not.

    Autograd's threads have no frames of Python but those of recomputation and of hooks.

    >>> part_of((Frame("torch/optim/adamw.py", 250, "step"),), RunPart.BACKWARD).value
    'step'
    """
    if stack and stack[-1].file == OWN_FILE:
        return RunPart(stack[-1].name)
    own = [frame for frame in stack if frame.file.endswith(".py")]
    if any("torch/optim/" in frame.file for frame in own):
        return RunPart.STEP
    if not own or any(_is_backward(frame) for frame in stack):
        return before if before is RunPart.LOAD and not own else RunPart.BACKWARD
    if any(frame.name == "forward" for frame in own):
        return RunPart.FORWARD
    return before


def _is_backward(frame: Frame) -> bool:
    if "autograd::Engine" in frame.name or "torch/autograd/" in frame.file:
        return True
    return frame.name in {"backward", "unpack_hook"} and "torch/" in frame.file
