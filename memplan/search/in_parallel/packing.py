"""Values on their way between processes, with objects that both have told by their numbers."""

import pickle
from collections.abc import Sequence
from io import BytesIO
from typing import Any


class _Packer(pickle.Pickler):
    def __init__(self, file: BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(each): number for number, each in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj))


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> object:
        return self._shared[pid]


def packed(value: object, shared: Sequence[object]) -> bytes:
    """A value as bytes, shared objects as their numbers."""
    file = BytesIO()
    _Packer(file, shared).dump(value)
    return file.getvalue()


def unpacked(data: bytes, shared: Sequence[object]) -> Any:
    """The value again, with these objects in it."""
    return _Unpacker(BytesIO(data), shared).load()
