"""How a setup says that its frozen base is quantized: by a name, by fields, by ``engine_options``."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.training.quantization import (
    NOT_QUANTIZED,
    Quantization,
    QuantizationKind,
    QuantizedProduct,
    Upcast,
    kind_named,
)

_NONE = (NOT_QUANTIZED, "false", "no", "off")


def read_quantization(value: object) -> Quantization | str | None:
    """A quantization by its format's name, or out of a mapping of ``Quantization``'s own fields.

    ``none`` stays what it is: the base is kept as it is loaded.

    Raises ``SetupError`` for formats and fields that do not exist.

    >>> str(read_quantization("nf4"))
    'nf4, blocks of 64'
    >>> str(read_quantization({"kind": "gptq", "bits": 8}))
    'gptq, 8 bits, groups of 128'
    """
    if value is None or isinstance(value, Quantization):
        return value
    if isinstance(value, QuantizationKind):
        return Quantization(kind=value)
    if isinstance(value, Mapping):
        return _read_fields(value)
    if value is False or (isinstance(value, str) and value.lower() in _NONE):
        return NOT_QUANTIZED
    return Quantization(kind=kind_named(value))


def _read_fields(value: Mapping[object, object]) -> Quantization:
    known = [each.name for each in fields(Quantization)]
    found: dict[str, Any] = {}
    for key, each in value.items():
        if key not in known:
            hint = did_you_mean(str(key), known) or f" There are: {', '.join(known)}"
            msg = f"quantize: {key}: no such setting.{hint}"
            raise SetupError(msg)
        found[str(key)] = each
    if "kind" not in found:
        msg = "quantize: kind: which format is meant, such as nf4?"
        raise SetupError(msg)
    return Quantization(**{**found, "kind": kind_named(found["kind"])})


def with_options(base: Quantization, options: Mapping[str, object]) -> Quantization:
    """A quantization with what ``engine_options`` say of it.

    Raises ``SetupError`` for values that cannot be.

    >>> str(with_options(read_quantization("nf4"), {"double_quant": True}))
    'nf4, blocks of 64, double quantization'
    """
    changes = {
        field: options[name]
        for name, field in OPTION_FIELDS.items()
        if options.get(name) is not None
    }
    return replace(base, **changes) if changes else base  # type: ignore[arg-type]


OPTION_FIELDS = {
    "double_quant": "double_quant", "prepare_for_kbit": "prepared", "compute_dtype": "compute_dtype",
    "quant_storage": "storage_dtype", "quant_block_size": "block_size", "quant_bits": "bits",
    "skip_modules": "skip_modules", "quant_keeps_inputs": "keeps_inputs",
}  # fmt: skip
"""Names under ``engine_options`` -> the fields that they set."""


def filled_in(
    base: Quantization,
    options: Mapping[str, object],
    *,
    half: DType,
    sharded_by: str = "",
    cast_by: str = "",
) -> Quantization:
    """A setup's quantization: what ``engine_options`` say of it, and formats where nothing does.

    ``half`` is what the setup multiplies in, ``sharded_by`` what keeps a part of the parameters on each
    rank, if anything does, ``cast_by`` what casts all parameters to one format.

    FSDP and ZeRO-3 shard floating-point parameters: bitsandbytes' 4-bit codes go by a floating format
    (peft's guides to FSDP and DeepSpeed, ``bnb_4bit_quant_storage``); LLM.int8() has int8 parameters,
    GPTQ and AWQ none at all. What peft's preparation casts to fp32 is cast back: by DeepSpeed's engine
    (``module.bfloat16()``), by FSDP's mixed precision.

    Raises ``SetupError`` for values that cannot be, and for what cannot be sharded.
    """
    how = with_options(base, options)
    if how.format.product is QuantizedProduct.BNB_4BIT:
        storage = how.storage_dtype or (half if sharded_by else DType.UINT8)
        how = replace(how, compute_dtype=how.compute_dtype or half, storage_dtype=storage)
    if how.format.is_calibrated:
        how = replace(how, prequantized=True)
    if how.upcast is not Upcast.NONE and cast_by:
        msg = (
            f"quantize: prepare_for_kbit: {cast_by} casts to {half.label} again what this leaves in "
            "fp32; leave it out"
        )
        raise SetupError(msg)
    if sharded_by:
        _check_shards(how, half, sharded_by)
    return how


def _check_shards(how: Quantization, half: DType, sharded_by: str) -> None:
    """Codes that are sharded go by the format of the other weights."""
    if not how.format.has_storage:
        msg = (
            f"quantize: {sharded_by} cannot shard {how.kind.value}: its codes are integers; quantize to "
            "nf4, or train with ddp or ZeRO up to stage 2"
        )
        raise SetupError(msg)
    if how.storage_dtype is not half:
        label = how.storage_dtype.label if how.storage_dtype is not None else ""
        msg = (
            f"quantize: quant_storage: {sharded_by} shards codes that go by the format of the other "
            f"weights, {half.label}, not {label}"
        )
        raise SetupError(msg)
