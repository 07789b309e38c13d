"""The ``quantization_config`` of a ``config.json``: how the checkpoint's weights are stored.

As transformers 5.23 reads it (utils/quantization_config.py): ``BitsAndBytesConfig``, ``GPTQConfig`` and
``AwqConfig`` have their own defaults; other methods are known by name alone.
"""

from collections.abc import Mapping

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.text import shown
from memplan.training.quantization import DTYPES, Quantization, QuantizationKind


def quantization_method(config: Mapping[str, object]) -> str:
    """What the config calls its method; bitsandbytes' may be told by its flags alone.

    >>> quantization_method({"load_in_4bit": True})
    'bitsandbytes'
    """
    if any(config.get(key) for key in ("load_in_4bit", "load_in_8bit", "_load_in_4bit")):
        return "bitsandbytes"
    method = config.get("quant_method") or config.get("quant_algo")
    return str(method).lower() if method else "not named"


def is_modelled(config: Mapping[str, object]) -> bool:
    """Whether a base that is stored so can be trained on as it is."""
    return quantization_method(config) in _MODELLED


def read_quantization_config(config: Mapping[str, object]) -> Quantization | None:
    """How such a checkpoint's linear layers are packed; None for a method that is not modelled.

    Raises ``SetupError`` for values that a method does not have.

    >>> str(read_quantization_config({"quant_method": "gptq", "bits": 4, "group_size": 32}))
    'gptq, 4 bits, groups of 32'
    """
    method = quantization_method(config)
    if method == "bitsandbytes":
        return _bitsandbytes(config)
    if method in _MODELLED:
        return _grouped(config, QuantizationKind(method))
    return None


_MODELLED = ("bitsandbytes", "gptq", "awq")


def _bitsandbytes(config: Mapping[str, object]) -> Quantization:
    """``BitsAndBytesConfig``: fp4 in blocks, computed in fp32, where it says nothing else."""
    skipped = _names(config.get("llm_int8_skip_modules"))
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return Quantization(kind=QuantizationKind.INT8, skip_modules=skipped, prequantized=True)
    kind = str(config.get("bnb_4bit_quant_type") or "fp4").lower()
    if kind not in ("nf4", "fp4"):
        msg = f"quantization_config: bnb_4bit_quant_type: {shown(kind)} is neither nf4 nor fp4"
        raise SetupError(msg)
    return Quantization(
        kind=QuantizationKind(kind),
        double_quant=bool(config.get("bnb_4bit_use_double_quant")),
        compute_dtype=_dtype(config, "bnb_4bit_compute_dtype", DType.FP32),
        storage_dtype=_dtype(config, "bnb_4bit_quant_storage", DType.UINT8),
        skip_modules=skipped,
        prequantized=True,
    )


def _grouped(config: Mapping[str, object], kind: QuantizationKind) -> Quantization:
    return Quantization(
        kind=kind,
        bits=_number(config, ("bits", "w_bit"), 4),
        block_size=_number(config, ("group_size", "q_group_size"), 128),
        skip_modules=_names(config.get("modules_to_not_convert")),
        prequantized=True,
    )


def _number(config: Mapping[str, object], keys: tuple[str, ...], default: int) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"quantization_config: {keys[0]}: expected a whole number, got {shown(value)}"
        raise SetupError(msg)
    return value


def _dtype(config: Mapping[str, object], key: str, default: DType) -> DType:
    value = config.get(key)
    if value is None:
        return default
    found = DTYPES.get(str(value).rsplit(".", maxsplit=1)[-1].lower())
    if found is None:
        msg = f"quantization_config: {key}: {shown(value)} is not modelled"
        raise SetupError(msg)
    return found


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(each for each in value if isinstance(each, str))
