"""From a checkpoint to a parameter count: its size, its index, or what its header says.

A ``.safetensors`` file begins with 8 bytes, the length of a JSON header that has each tensor's format and
shape (huggingface/safetensors, README, "Format"); the index of several has their bytes in
``metadata.total_size``. A pickle (``pytorch_model.bin``) is not read: its size is what is known of it.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

from memplan.errors import ConfigError, UsageError
from memplan.model.checkpoint import CheckpointCount
from memplan.sources.files import check_tree, read_head, read_json_mapping
from memplan.units import GB, GIB, MIB, parse_bytes

MAX_HEADER_BYTES = 100 * MIB
"""Longest header that is read, as the format's own reader has it (safetensors, ``MAX_HEADER_SIZE``)."""
INDEX_SUFFIX = ".index.json"
_FORMATS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
_DTYPES = {
    "float32": ("fp32", 4), "bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float8_e4m3fn": ("fp8", 1),
}  # fmt: skip
WIDTHS = (("fp32", 4), ("bf16 or fp16", 2), ("8 bits", 1))
"""Formats that a size alone leaves open."""


def read_checkpoint(text: str) -> tuple[CheckpointCount, ...]:
    """What a size or a file says: one count where the file knows its format, else one for each.

    Raises ``ConfigError`` for a file that cannot be read, and ``UsageError`` for what is neither.

    >>> [(each.format, each.unit, each.num_params) for each in read_checkpoint("42.1 GB")][:2]
    [('fp32', 'GB', 10525000000), ('fp32', 'GiB', 11301132697)]
    """
    path = Path(text)
    name = path.name.lower()
    if name.endswith(INDEX_SUFFIX):
        return _of_index(path)
    if name.endswith(".safetensors"):
        return _of_header(path)
    if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
        return _by_width(_size_of(path))
    try:
        num_bytes = parse_bytes(text)
    except UsageError as error:
        msg = (
            f"{text}: is no size and no file of weights (pytorch_model.bin, model.safetensors, "
            f"model.safetensors{INDEX_SUFFIX}): {error}"
        )
        raise UsageError(msg) from None
    if "i" in text.lower():
        return _by_width(num_bytes)
    # Tools that say GB often mean GiB.
    other = num_bytes * GIB // GB if text.lower().strip().endswith("gb") else 0
    found = _by_width(num_bytes, unit="GB") + (_by_width(other, unit="GiB") if other else ())
    return tuple(sorted(found, key=lambda each: [name for name, _ in WIDTHS].index(each.format)))


def _by_width(num_bytes: int, *, unit: str = "") -> tuple[CheckpointCount, ...]:
    return tuple(
        CheckpointCount(format=name, unit=unit, num_bytes=num_bytes, num_params=num_bytes // width)
        for name, width in WIDTHS
    )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError) as error:
        msg = f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(msg) from None


def _of_index(path: Path) -> tuple[CheckpointCount, ...]:
    """An index: all bytes, and the format that a config beside it names."""
    found = read_json_mapping(path)
    metadata = found.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(size) is not int and not (isinstance(size, float) and size.is_integer()):
        msg = f"{path}: metadata.total_size is missing: expected the index of a checkpoint's files"
        raise ConfigError(msg)
    assert size is not None
    if size < 1:
        msg = f"{path}: metadata.total_size: expected bytes, more than 0"
        raise ConfigError(msg)
    config = path.with_name("config.json")
    named: object = None
    if config.exists():
        beside = read_json_mapping(config)
        named = beside.get("dtype", beside.get("torch_dtype"))
    known = _DTYPES.get(str(named).removeprefix("torch."))
    if known is None:
        return _by_width(int(size))
    name, width = known
    return (
        CheckpointCount(format=name, unit="", num_bytes=int(size), num_params=int(size) // width),
    )


def _of_header(path: Path) -> tuple[CheckpointCount, ...]:
    """A file of tensors: each format's own count, by its header."""
    kind = "a header of tensors' names, formats and shapes"
    length = int.from_bytes(read_head(path, num_bytes=8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        msg = f"{path}: is no .safetensors file: its first 8 bytes are no length of {kind}"
        raise ConfigError(msg)
    try:
        header: Any = json.loads(read_head(path, num_bytes=8 + length)[8:])
        found: dict[str, int] = {}
        check_tree(header, label=str(path))
        for name, tensor in header.items():
            if name != "__metadata__":
                numel = prod(_whole(size) for size in tensor["shape"])
                found[tensor["dtype"]] = found.get(tensor["dtype"], 0) + numel
        return tuple(
            CheckpointCount(
                format=name, unit="", num_bytes=count * _FORMATS[name], num_params=count
            )
            for name, count in found.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        msg = f"{path}: is no .safetensors file: expected {kind} at its beginning"
        raise ConfigError(msg) from None


def _whole(size: object) -> int:
    if type(size) is not int or size < 0:
        raise TypeError
    return size
