"""How long sequences are, as far as the data at hand says."""

from collections.abc import Mapping, Sized
from typing import Any

LOOKED_AT = 256
"""Examples of a data set that are looked at. An assumption: a longer one may come later, so the answer says where its length is from."""
_IDS = ("input_ids", "prompt_input_ids", "labels")


def longest(dataset: Any) -> int | None:
    """The longest of the first examples [tokens]; None where they are no ids, or can only be read once.

    Examples are asked for by their number, which draws no random number and moves no iterator.

    >>> longest([{"input_ids": [1] * 7}, {"input_ids": [1] * 9}])
    9
    """
    if dataset is None or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        return None
    found = []
    for index in range(min(len(dataset), LOOKED_AT)):
        example = dataset[index]
        ids = (
            next((example[key] for key in _IDS if key in example), None)
            if isinstance(example, Mapping)
            else None
        )
        if ids is None:
            return None
        found.append(_length(ids))
    return max(found, default=None)


def _length(ids: Any) -> int:
    shape = getattr(ids, "shape", None)
    return int(shape[-1]) if shape is not None and len(shape) else len(ids)


def batch_shape(batch: Any) -> tuple[int, int] | None:
    """Sequences and tokens of a batch; None where it holds no ids.

    >>> import types
    >>> batch_shape({"input_ids": types.SimpleNamespace(shape=(4, 128))})
    (4, 128)
    """
    for key in _IDS:
        shape = getattr(batch.get(key), "shape", None) if isinstance(batch, Mapping) else None
        if shape is not None and len(shape) == 2:
            return int(shape[0]), int(shape[1])
    return None
