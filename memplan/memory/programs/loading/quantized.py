"""Loading a base whose linear layers are quantized, as transformers 5.23 and peft 0.21 do it."""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Buffer
from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.programs.loading.by_name import load_adapters, place_in_file, warm_up
from memplan.memory.programs.loading.tables import Tables
from memplan.memory.programs.weights import Places, Weight
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.quantization import Quantization, QuantizedProduct, Upcast
from memplan.units import ceil_div

_PACKING = "a weight while it is quantized"


def load_quantized(
    ledger: Ledger,
    weights: Sequence[Weight],
    tables: Tables,
    options: TapeOptions,
    *,
    by_device_map: bool,
    places: Places,
) -> tuple[dict[Weight, Block], list[Weight]]:
    """The base, weight by weight; what is left of it cast to fp32; and the adapters, which come last: in the format in
    which a 4-bit layer computes (peft 0.21, ``_get_base_layer_device_and_dtype``). Returned with those yet to be cast.

    Another loader than transformers' takes them in the order of their modules: torchtune's, one of one's
    own. A weight's scales come behind it, what is in no file at the end: those of ``places``, others later.
    """
    how = options.quantization
    assert how is not None
    scales, others = _beside_weights(weights, places, how)
    packed: dict[Weight, Block] = {}
    loaded: dict[Weight, Block] = {}
    base = [each for each in weights if not each[0].of_adapter]
    if by_device_map:
        base.sort(key=place_in_file)
        warm_up(ledger, sum(_counted_bytes(weight[0], options) for weight in base))
    for weight in base:
        if weight[0].packed is not None and not how.prequantized:
            packed[weight] = pack(ledger, weight, how, ComponentKind.PARAMETERS)
        else:
            size = allocated_bytes(weight[0].numel, loaded_dtype(weight[0], options))
            loaded[weight] = ledger.allocate(size, 0, ComponentKind.PARAMETERS, weight)
        for each in scales.get(weight, ()):
            tables.load(each)
    for each in others:
        tables.load(each)
    if how.upcast is not Upcast.NONE:
        _upcast(ledger, loaded, options.quantized_from)
    cast = load_adapters(ledger, weights, loaded, how.compute_dtype or DType.FP32)
    return packed | loaded, cast


def _beside_weights(
    weights: Sequence[Weight],
    places: Places,
    how: Quantization,
) -> tuple[dict[Weight, list[Buffer]], list[Buffer]]:
    """The scales of each packed weight, and all other buffers."""
    scales: dict[Weight, list[Buffer]] = {}
    others: list[Buffer] = []
    owner: Weight | None = None
    for weight in (*weights, None):
        for each in places.get(weight, ()):
            if owner is not None and each.words == how.scale_words:
                scales.setdefault(owner, []).append(each)
            else:
                others.append(each)
        if weight is not None and weight[0].packed is not None:
            owner = weight
    return scales, others


def _counted_bytes(parameter: Parameter, options: TapeOptions) -> int:
    """What ``get_total_byte_count`` takes a weight for: codes as wide as their bits."""
    if parameter.packed is None:
        return parameter.numel * loaded_dtype(parameter, options).num_bytes
    return parameter.storage.num_bytes


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
    before, behind = 0, 0
    if how.format.product is QuantizedProduct.BNB_INT8:
        before = allocated_bytes(packed.numel, DType.FP16)
    elif how.double_quant:
        before = behind = allocated_bytes(ceil_div(packed.numel, how.block_size), DType.FP32)
    first = ledger.allocate(before, 0, kind, _PACKING) if before else None
    codes = ledger.allocate(weight[0].storage.num_bytes, 0, purpose, weight)
    if behind:
        ledger.use(behind, kind=kind, name=_PACKING)
    if first is not None:
        ledger.free(first)
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
