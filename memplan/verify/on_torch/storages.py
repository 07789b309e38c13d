"""Every storage of a pretended card, from when it is made until it is let go."""

import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter


class StorageRecorder(TorchDispatchMode):
    """Notes each CUDA storage as the allocator would be asked for it, and as it would be freed.

    ``events`` are as ``memplan.memory.replaying.allocator`` reads them. Views share a storage, and so are no
    events; a wrapper of other tensors (DTensor) has none of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self.live: dict[int, int] = {}
        """Storages by their address in torch, and the event that made them."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and look at what it returns."""
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # it asks again with the tensors that it wraps
        made = func(*args, **(kwargs or {}))
        for leaf in tree_iter(made):
            self._see(leaf)
        return made

    def __enter__(self) -> Self:
        """Watch storages that are resized in place too: FSDP2 frees gathered parameters so."""
        self._resize: Any = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            found = self._resize(storage, size)
            self._resized(storage)
            return found

        torch.UntypedStorage.resize_ = resize_
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave torch as it was."""
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _see(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
            return
        if is_traceable_wrapper_subclass(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self.live:
            return
        self._made(storage._cdata, storage.nbytes())
        weakref.finalize(storage, self._gone, storage._cdata)

    def _made(self, key: int, num_bytes: int) -> None:
        self.live[key] = len(self.events)
        if num_bytes:
            self.events.append(num_bytes)
        else:
            # Nothing is asked for; the storage may grow.
            self.live[key] = -1

    def _gone(self, key: int) -> None:
        made = self.live.pop(key, -1)
        if made >= 0:
            self.events.append(~made)

    def _resized(self, storage: Any) -> None:
        if storage._cdata in self.live:
            self._gone(storage._cdata)
            self._made(storage._cdata, storage.nbytes())
