"""Reads a memory snapshot: the pickle that ``torch.cuda.memory._dump_snapshot`` writes.

A pickle is a program, and Python's own reader runs whatever one asks for. A snapshot needs none of that:
this reader knows the operations that build dicts, lists, tuples, text and numbers, and refuses a file at
the first other one. Keys are text, so that nothing is hashed that a file made up; nothing is called,
imported or followed, and what is built is bounded.

The operations are those of Lib/pickle.py and Lib/pickletools.py (protocols 2 to 5).
"""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

from memplan.errors import InputError
from memplan.memory.snapshots.snapshot import Snapshot
from memplan.sources.files import read_bytes
from memplan.units import GIB

MAX_SNAPSHOT_BYTES = 1 * GIB
"""Largest snapshot that is read [bytes]."""
MAX_CONTAINERS = 20_000_000
"""Most dicts, lists and tuples that are built: an empty one takes a byte of the file and 64 of memory."""
MAX_OPERATIONS = 200_000_000
"""Most operations that are followed: each makes one value, or a name for one, of some 50 bytes."""
MAX_DEPTH = 50
"""Deepest nesting: a frame of a block's history lies 7 containers deep. What holds itself has no end."""

_PROTOCOLS = range(2, 6)
_MARK = object()


def read_snapshot(path: str | Path) -> object:
    """Read what a snapshot file holds: plain containers, whatever their form.

    Raises ``ConfigError`` for a file that cannot be read, and ``InputError`` for one that holds more
    than containers, numbers and text.
    """
    data = read_bytes(path, max_bytes=MAX_SNAPSHOT_BYTES, kind="a memory snapshot")
    return parse_plain(data, source=str(path))


def snapshot_pickle(snapshot: Snapshot) -> bytes:
    """A snapshot as torch writes one, in the protocol that its viewers read."""
    return pickle.dumps(snapshot, protocol=4)


def parse_plain(data: bytes, *, source: str) -> object:
    """What a pickle of plain containers holds.

    Raises ``InputError`` for any other file.

    >>> parse_plain(pickle.dumps({"segments": [1, (2.5, None)]}), source="a.pickle")
    {'segments': [1, (2.5, None)]}
    """
    reader = _PlainReader(data)
    try:
        return reader.run()
    except _RefusedError as error:
        problem = str(error)
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error):
        # Operations that do not fit together; a UnicodeDecodeError is a ValueError.
        problem = f"is no pickle, or is cut off: it cannot be read on at byte {reader.at}"
    msg = (
        f"{source}: {problem}; expected the file that torch.cuda.memory._dump_snapshot writes, "
        "which holds containers, numbers and text alone"
    )
    raise InputError(msg)


class _RefusedError(Exception):
    """The file asks for something that no snapshot needs."""


class _PlainReader:
    """The operations that plain containers need, on a stack."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.left = MAX_CONTAINERS

    def run(self) -> object:
        """Follow the operations up to the last one."""
        operations: dict[int, Callable[[], None]] = {
            code[0]: operation.__get__(self) for code, operation in _OPERATIONS.items()
        }
        data = self.data
        for _ in range(MAX_OPERATIONS):
            code = data[self.at]
            operation = operations.get(code)
            if operation is None:
                if code == pickle.STOP[0] and self.stack[-1] is not _MARK:
                    return _of_bounded_depth(self.stack.pop())
                msg = f"asks for {_operation_name(code)} at byte {self.at}, and is refused"
                raise _RefusedError(msg)
            self.at += 1
            operation()
        msg = f"holds more than {MAX_OPERATIONS:,} operations"
        raise _RefusedError(msg)

    # -- bytes -----------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        """The next bytes, all of them there."""
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise IndexError
        self.at += count
        return taken

    def unsigned(self, count: int) -> int:
        """A number from 0 up."""
        return int.from_bytes(self.take(count), "little")

    def protocol(self) -> None:
        """The version of the format."""
        number = self.unsigned(1)
        if number not in _PROTOCOLS:
            msg = f"is a pickle of protocol {number}, and {_PROTOCOLS[0]} to {_PROTOCOLS[-1]} are read"
            raise _RefusedError(msg)

    def frame(self) -> None:
        """A length that nothing depends on."""
        self.take(8)

    # -- values ----------------------------------------------------------------------------------

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def byte(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def short(self) -> None:
        self.stack.append(self.unsigned(2))

    def integer(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.unsigned(1)), "little", signed=True))

    def float(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def text1(self) -> None:
        self.text(1)

    def text4(self) -> None:
        self.text(4)

    def text8(self) -> None:
        self.text(8)

    def text(self, length_bytes: int) -> None:
        """Text behind its length."""
        found = self.take(self.unsigned(length_bytes))
        self.stack.append(found.decode("utf-8", "surrogatepass"))

    # -- what was there before -------------------------------------------------------------------

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put1(self) -> None:
        self.memo[self.unsigned(1)] = self.stack[-1]

    def put4(self) -> None:
        self.memo[self.unsigned(4)] = self.stack[-1]

    def get1(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def get4(self) -> None:
        self.stack.append(self.memo[self.unsigned(4)])

    # -- containers ------------------------------------------------------------------------------

    def new(self, container: object) -> None:
        """One more container."""
        self.left -= 1
        if self.left < 0:
            msg = f"holds more than {MAX_CONTAINERS:,} containers"
            raise _RefusedError(msg)
        self.stack.append(container)

    def mark(self) -> None:
        self.stack.append(_MARK)

    def popped(self) -> list[object]:
        """What stands above the last mark."""
        stack = self.stack
        position = len(stack) - 1
        while stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise IndexError
        found = stack[position + 1 :]
        del stack[position:]
        return found

    def empty_dict(self) -> None:
        self.new({})

    def empty_list(self) -> None:
        self.new([])

    def marked_tuple(self) -> None:
        self.new(tuple(self.popped()))

    def empty_tuple(self) -> None:
        self.new(())

    def tuple1(self) -> None:
        self.last(1)

    def tuple2(self) -> None:
        self.last(2)

    def tuple3(self) -> None:
        self.last(3)

    def last(self, count: int) -> None:
        """A tuple of the last values."""
        found = tuple(self.stack[-count:])
        if len(found) < count:
            raise IndexError
        del self.stack[-count:]
        self.new(found)

    def append(self) -> None:
        value = self.stack.pop()
        self.extend([value])

    def appends(self) -> None:
        self.extend(self.popped())

    def extend(self, values: list[object]) -> None:
        """Add to the list on top."""
        top = self.stack[-1]
        if not isinstance(top, list):
            raise TypeError
        top.extend(values)

    def setitem(self) -> None:
        value = self.stack.pop()
        self.update([self.stack.pop(), value])

    def setitems(self) -> None:
        self.update(self.popped())

    def update(self, pairs: list[object]) -> None:
        """Add to the dict on top, whose keys are text."""
        top = self.stack[-1]
        if not isinstance(top, dict):
            raise TypeError
        for index in range(0, len(pairs), 2):
            key = pairs[index]
            if not isinstance(key, str):
                msg = f"has a key that is not text before byte {self.at}, and is refused"
                raise _RefusedError(msg)
            top[key] = pairs[index + 1]


_OPERATIONS: dict[bytes, Callable[[_PlainReader], None]] = {
    pickle.PROTO: _PlainReader.protocol, pickle.FRAME: _PlainReader.frame,
    pickle.NONE: _PlainReader.none,
    pickle.NEWTRUE: _PlainReader.true, pickle.NEWFALSE: _PlainReader.false,
    pickle.BININT1: _PlainReader.byte, pickle.BININT2: _PlainReader.short,
    pickle.BININT: _PlainReader.integer, pickle.LONG1: _PlainReader.long,
    pickle.BINFLOAT: _PlainReader.float,
    pickle.SHORT_BINUNICODE: _PlainReader.text1, pickle.BINUNICODE: _PlainReader.text4,
    pickle.BINUNICODE8: _PlainReader.text8,
    pickle.MEMOIZE: _PlainReader.memoize,
    pickle.BINPUT: _PlainReader.put1, pickle.LONG_BINPUT: _PlainReader.put4,
    pickle.BINGET: _PlainReader.get1, pickle.LONG_BINGET: _PlainReader.get4,
    pickle.MARK: _PlainReader.mark,
    pickle.EMPTY_DICT: _PlainReader.empty_dict, pickle.EMPTY_LIST: _PlainReader.empty_list,
    pickle.EMPTY_TUPLE: _PlainReader.empty_tuple, pickle.TUPLE: _PlainReader.marked_tuple,
    pickle.TUPLE1: _PlainReader.tuple1, pickle.TUPLE2: _PlainReader.tuple2,
    pickle.TUPLE3: _PlainReader.tuple3,
    pickle.APPEND: _PlainReader.append, pickle.APPENDS: _PlainReader.appends,
    pickle.SETITEM: _PlainReader.setitem, pickle.SETITEMS: _PlainReader.setitems,
}  # fmt: skip
"""All that is done; a file that asks for more is refused."""


def _of_bounded_depth(found: object) -> object:
    """What was read, level by level: a container that holds another one twice is looked at once."""
    level = [found]
    for _ in range(MAX_DEPTH):
        inside: dict[int, object] = {}
        for each in level:
            if isinstance(each, _CONTAINERS):
                held = each.values() if isinstance(each, dict) else each
                inside.update((id(one), one) for one in held if isinstance(one, _CONTAINERS))
        if not inside:
            return found
        level = [*inside.values()]
    msg = f"is nested more than {MAX_DEPTH} levels deep"
    raise _RefusedError(msg)


_CONTAINERS = (dict, list, tuple)


def _operation_name(code: int) -> str:
    import pickletools

    for known in pickletools.opcodes:
        if known.code == chr(code):
            return known.name
    return f"the unknown operation {code}"
