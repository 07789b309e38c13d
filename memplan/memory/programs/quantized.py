"""Loading a base whose linear layers are quantized, as transformers 5.23 and peft 0.21 do it."""

from collections.abc import Mapping, Sequence

from memplan.dtypes import DType
from memplan.graph.options import TapeOptions
from memplan.graph.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.ledger import Block, Ledger
from memplan.training.quantization import Quantization, QuantizedProduct, Upcast
from memplan.units import ceil_div

Weight = tuple[Parameter, int]
"""A parameter of a segment, and which of the segment's copies it is of."""
_PACKING = "a weight while it is quantized"


def load_quantized(
    ledger: Ledger,
    weights: Sequence[Weight],
    places: Mapping[Weight | None, Sequence[tuple[int, str]]],
    options: TapeOptions,
) -> dict[Weight, Block]:
    """The base, weight by weight; what is left of it cast to fp32; and the adapters, which come last.

    ``places`` are the buffers that stand before each weight, their bytes and words.
    """
    how = options.quantization
    assert how is not None
    packed: dict[Weight, Block] = {}
    loaded: dict[Weight, Block] = {}
    adapters: list[Weight] = []
    for weight in (*weights, None):
        for size, words in places.get(weight, ()):
            ledger.allocate(size, 0, ComponentKind.BUFFERS, words)
        if weight is None:
            continue
        if weight[0].of_adapter:
            adapters.append(weight)
        elif weight[0].packed is not None and not how.prequantized:
            packed[weight] = pack(ledger, weight, how, ComponentKind.PARAMETERS)
        else:
            size = allocated_bytes(weight[0].numel, loaded_dtype(weight[0], options))
            loaded[weight] = ledger.allocate(size, 0, ComponentKind.PARAMETERS, weight)
    if how.upcast is not Upcast.NONE:
        _upcast(ledger, loaded, options.quantized_from)
    for weight in adapters:
        size = weight[0].storage.num_bytes
        loaded[weight] = ledger.allocate(size, 0, ComponentKind.PARAMETERS, weight)
    return packed | loaded


def loaded_dtype(parameter: Parameter, options: TapeOptions) -> DType:
    """The format in which a weight comes to the GPU: the checkpoint's, before it is cast to fp32."""
    how = options.quantization
    assert how is not None
    is_cast = how.upcast is not Upcast.NONE and parameter.dtype is DType.FP32
    return options.quantized_from if is_cast else parameter.dtype


def pack(ledger: Ledger, weight: Weight, how: Quantization, purpose: ComponentKind) -> Block:
    """One weight in full, its codes, and what its scales are made in; then the whole goes.

    (transformers 5.23, integrations/bitsandbytes.py, ``Bnb4bitQuantize`` and ``Bnb8bitQuantize``: the
    latter has an fp16 copy beside the weight; bitsandbytes 0.50.2, ``quantize_4bit``)
    """
    packed = weight[0].packed
    assert packed is not None
    kind = ComponentKind.TEMPORARIES
    whole = ledger.allocate(allocated_bytes(packed.numel, packed.loaded), 0, kind, _PACKING)
    scratch: tuple[int, ...] = ()
    if how.format.product is QuantizedProduct.BNB_INT8:
        scratch = (allocated_bytes(packed.numel, DType.FP16),)
    elif how.double_quant:
        scales = allocated_bytes(ceil_div(packed.numel, how.block_size), DType.FP32)
        scratch = (scales, scales)
    codes = ledger.allocate(weight[0].storage.num_bytes, 0, purpose, weight)
    ledger.use(*scratch, kind=kind, name=_PACKING)
    ledger.free(whole)
    return codes


def _upcast(ledger: Ledger, loaded: dict[Weight, Block], before: DType) -> None:
    """``prepare_model_for_kbit_training``: ``param.data.to(torch.float32)``, and an empty cache."""
    for weight, block in list(loaded.items()):
        parameter = weight[0]
        if parameter.packed is None and parameter.dtype is not before:
            size = parameter.storage.num_bytes
            loaded[weight] = ledger.allocate(size, 0, ComponentKind.PARAMETERS, weight)
            ledger.free(block)
    ledger.empty_cache()
