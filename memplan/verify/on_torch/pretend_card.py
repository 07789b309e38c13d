"""A CUDA card that is not there, so that real code trains fake tensors on it.

``FakeTensorMode`` has tensors with shapes, formats and storages but without values, on any device.
Autograd alone asks the device itself for streams, which ``pretend_card.cpp`` answers; it is compiled
once for each torch. Everything here is undone when the card is taken away.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor

from memplan.errors import UsageError
from memplan.hardware.gpu import GpuSpec

SOURCE = Path(__file__).with_name("pretend_card.cpp")
COMPILERS = ("c++", "g++", "clang++")
CXX_STANDARD = "-std=c++20"
"""What torch's own headers are written in."""


@contextlib.contextmanager
def pretended_card(gpu: GpuSpec) -> Iterator[None]:
    """Have torch believe in one card of this kind.

    Raises ``UsageError`` where the few lines that it takes cannot be compiled.
    """
    library = ctypes.CDLL(str(_library()))
    library.exchange_card()
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in _replacements(gpu):
                stack.enter_context(_replaced(owner, name, value))
            yield
    finally:
        library.exchange_card()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _library() -> Path:
    """The compiled lines, made anew where torch is another."""
    torch_dir = Path(torch.__file__).parent
    made_of = SOURCE.read_bytes() + f"{torch.__version__} {torch_dir}".encode()
    place = _cache() / f"pretend_card-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not place.exists():
        _compile(torch_dir, place)
    return place


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "memplan"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="memplan-"))
    return folder


def _compile(torch_dir: Path, place: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        msg = (
            "there is no GPU here, and to follow the code on fake tensors instead takes a C++ compiler "
            "(g++ or clang++), once: install one (apt-get install g++), or run this where a GPU is"
        )
        raise UsageError(msg)
    headers, libraries = torch_dir / "include", torch_dir / "lib"
    beside = place.with_suffix(f".{os.getpid()}.so")
    command = [
        compiler, CXX_STANDARD, "-O1", "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{headers}", f"-I{headers / 'torch' / 'csrc' / 'api' / 'include'}", str(SOURCE),
        "-o", str(beside), f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        said = next(
            (line for line in made.stderr.splitlines() if "error" in line), "no word of why"
        )
        msg = (
            f"there is no GPU here, and what follows the code on fake tensors instead does not compile "
            f"against torch {torch.__version__}: {said}"
        )
        raise UsageError(msg)
    beside.replace(place)


class _Event:
    """An event that is always over."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream(_Event):
    """The one stream, on which everything is done at once."""

    stream_id, device_index, device_type, cuda_stream = 0, 0, 1, 0
    device = torch.device("cuda", 0)

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self, event: object = None) -> _Event:  # noqa: ARG002
        return _Event()


def _replacements(gpu: GpuSpec) -> Iterator[tuple[Any, str, object]]:
    """What training code asks of ``torch.cuda``, and what it is told."""
    capability = gpu.compute_capability or (8, 0)
    stream = _Stream()
    properties = type(
        "Properties",
        (),
        {
            "name": gpu.short_name, "major": capability[0], "minor": capability[1],
            "total_memory": gpu.capacity_bytes, "multi_processor_count": 108,
        },
    )()  # fmt: skip
    told: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "is_bf16_supported": lambda *_, **__: gpu.has_bf16,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "_lazy_init": lambda: None,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, answer in told.items():
        yield torch.cuda, name, answer
    yield torch.Tensor, "record_stream", lambda *_: None
    yield fake_tensor, "init_gpu_context", lambda *_, **__: None
    yield torch, "tensor", _tensor_on_card


_tensor = torch.tensor


def _tensor_on_card(data: object, *args: object, device: object = None, **kwargs: Any) -> Any:
    """``torch.tensor``: on the card its value plays no part, and its storage does."""
    made = _tensor(data, *args, **kwargs)
    if device is not None and torch.device(device).type == "cuda":
        return torch.empty(made.shape, dtype=made.dtype, device=device)
    return made
