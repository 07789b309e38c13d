"""Weights that transformers loads right onto the GPU: ``from_pretrained(device_map=...)`` (5.23).

One block as large as all of them is asked for and given back first, so that those above a MiB are parts of
one segment (modeling_utils.py, ``caching_allocator_warmup``, since 4.49), and they come in the order of
their names (core_model_loading.py, ``dot_natural_key``). Adapters are made when the base is there.
"""

from collections.abc import Iterable, Sequence

from memplan.dtypes import DType
from memplan.graph.core.overlay import BASE_LAYER
from memplan.graph.core.tensors import allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.programs.loading.tables import Tables
from memplan.memory.programs.weights import Weight
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.model.parameters import WeightRole

_WARM_UP = "a block as large as the base, before it is loaded"
_AS_THE_BASE = "an adapter's weight in the base's format"


def warm_up(ledger: Ledger, num_bytes: int) -> None:
    """Ask for one block and give it back."""
    ledger.use(num_bytes, kind=ComponentKind.TEMPORARIES, name=_WARM_UP)


def place_in_file(weight: Weight) -> tuple[bool, int, int, str]:
    """Where it stands: ``lm_head`` first, then segment by segment, a layer's weights by their names."""
    parameter, copy = weight
    is_head = parameter.role is WeightRole.OUTPUT
    return not is_head, parameter.storage.segment, copy, parameter.name.replace(BASE_LAYER, "")


def load_by_name(
    ledger: Ledger, weights: Sequence[Weight], tables: Tables
) -> tuple[dict[Weight, Block], list[Weight]]:
    """The base as it is; what is in no file behind it, then the adapters, which come last.

    peft makes an adapter in the format of the layer that it stands on. Returned are all blocks, and the
    adapter's weights that are to be cast (``cast_adapters``).
    """
    base = sorted((each for each in weights if not each[0].of_adapter), key=place_in_file)
    warm_up(ledger, sum(each[0].numel * each[0].dtype.num_bytes for each in base))
    loaded = {
        each: ledger.allocate(each[0].storage.num_bytes, 0, ComponentKind.PARAMETERS, each)
        for each in base
    }
    for buffers in tables.places.values():
        for each in buffers:
            tables.load(each)
    narrow = min((each[0].dtype for each in base), key=lambda dtype: dtype.num_bytes)
    return loaded, load_adapters(ledger, weights, loaded, narrow)


def load_adapters(
    ledger: Ledger, weights: Sequence[Weight], loaded: dict[Weight, Block], narrow: DType
) -> list[Weight]:
    """Those that peft makes in a narrower format than they are trained in: to be cast (``cast_adapters``)."""
    cast: list[Weight] = []
    for weight in weights:
        parameter = weight[0]
        if not parameter.of_adapter:
            continue
        size = parameter.storage.num_bytes
        if parameter.dtype.num_bytes > narrow.num_bytes:
            cast.append(weight)
            size = allocated_bytes(parameter.numel, narrow)
            loaded[weight] = ledger.allocate(size, 0, ComponentKind.TEMPORARIES, _AS_THE_BASE)
        else:
            loaded[weight] = ledger.allocate(size, 0, ComponentKind.PARAMETERS, weight)
    return cast


def cast_adapters(ledger: Ledger, loaded: dict[Weight, Block], cast: Iterable[Weight]) -> None:
    """When all are there: ``param.data = param.data.to(torch.float32)`` (peft 0.21, ``cast_adapter_dtype``)."""
    for weight in cast:
        before = loaded[weight]
        size = weight[0].storage.num_bytes
        loaded[weight] = ledger.allocate(size, 0, ComponentKind.PARAMETERS, weight)
        ledger.free(before)
