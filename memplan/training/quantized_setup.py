"""What a setup makes of a quantization: formats filled in, and what its engine cannot do refused."""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.quantization import (
    Quantization,
    QuantizationKind,
    QuantizedProduct,
    with_options,
)
from memplan.training.setup import TrainingSetup, ZeroStage


def chosen_quantization(base: Quantization, setup: TrainingSetup) -> Quantization:
    """A setup's quantization: what ``engine_options`` say of it, and formats where nothing does.

    Raises ``SetupError`` for values that cannot be, and for what the engine cannot shard.
    """
    how = with_options(base, dict(setup.engine_options))
    four_bits = how.format.product is QuantizedProduct.BNB_4BIT
    half = half_format(setup)
    if four_bits and how.compute_dtype is None:
        how = replace(how, compute_dtype=half)
    if four_bits and how.storage_dtype is None:
        how = replace(how, storage_dtype=half if shards_parameters(setup) else DType.UINT8)
    if how.format.is_calibrated:
        how = replace(how, prequantized=True)
    _check_engine(how, setup)
    return how


def half_format(setup: TrainingSetup) -> DType:
    """The format that a setup multiplies in: 16 bits unless all of it is in fp32."""
    formats = PRECISIONS[setup.chosen_precision]
    return formats.autocast or formats.compute


def shards_parameters(setup: TrainingSetup) -> bool:
    """Whether each rank keeps a part of the parameters alone."""
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        return setup.zero_stage is ZeroStage.PARAMETERS
    return engine in (Engine.FSDP, Engine.FSDP1)


def _check_engine(how: Quantization, setup: TrainingSetup) -> None:
    """Refuse what the engine's own code does.

    FSDP and ZeRO-3 shard floating-point parameters: bitsandbytes' 4-bit codes go by a floating
    format (peft's guides to FSDP and DeepSpeed, ``bnb_4bit_quant_storage``); LLM.int8() has int8
    parameters, GPTQ and AWQ none at all. FSDP1 flattens parameters of one format alone
    (torch/distributed/fsdp/_flat_param.py, ``_init_metadata``).
    """
    if not shards_parameters(setup):
        return
    engine = setup.chosen_engine.value
    if engine == "deepspeed":
        engine = "ZeRO-3"
    if how.kind not in (QuantizationKind.NF4, QuantizationKind.FP4):
        msg = (
            f"quantize: {engine} cannot shard {how.kind.value}: its codes are integers; quantize to "
            "nf4, or train with ddp or ZeRO up to stage 2"
        )
        raise SetupError(msg)
    half = half_format(setup)
    if how.storage_dtype is not half:
        label = how.storage_dtype.label if how.storage_dtype is not None else ""
        msg = (
            f"quantize: quant_storage: {engine} shards codes that go by the format of the other "
            f"weights, {half.label}, not {label}"
        )
        raise SetupError(msg)
    if how.prepared and setup.chosen_engine is Engine.FSDP1:
        msg = (
            "quantize: prepare_for_kbit: fsdp1 flattens weights of one format, and this leaves norms "
            "and embeddings in fp32; leave it out"
        )
        raise SetupError(msg)
