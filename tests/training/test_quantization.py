"""What quantized formats store, and how setups and configs say them."""

from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.training.quantization import (
    QUANTIZED_FORMATS,
    Quantization,
    QuantizationKind,
)
from memplan.training.quantization_config import is_modelled, read_quantization_config
from memplan.training.quantize_setting import read_quantization
from memplan.training.setup import TrainingSetup


def stored_bytes(how: Quantization, out: int = 4096, width: int = 4096) -> int:
    shape, dtype = how.format.codes(out, width, how)
    numel = 1
    for size in shape:
        numel *= size
    states = how.format.states(out, width, how)
    return numel * dtype.num_bytes + sum(each.numel * each.dtype.num_bytes for each in states)


def read(value: Any) -> Quantization:
    found = read_quantization(value)
    assert isinstance(found, Quantization)
    return found


N = 4096 * 4096


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        # arXiv:2305.14314, section 3: 0.5 bits a parameter for 32-bit scales of 64, 0.127 with double
        # quantization; and the maps beside them.
        pytest.param("nf4", N // 2 + 4 * N // 64 + 64, id="nf4"),
        pytest.param(
            {"kind": "nf4", "double_quant": True},
            N // 2 + N // 64 + 4 * N // 64 // 256 + 64 + 4 + 1024, id="nf4, double",
        ),
        pytest.param({"kind": "fp4", "block_size": 128}, N // 2 + 4 * N // 128 + 64, id="fp4"),
        pytest.param("int8", N + 4 * 4096, id="int8"),
        pytest.param("gptq", N // 2 + 32 * 4096 * (2 + 1) - 32 * 4096 // 2 + 4 * 4096, id="gptq"),
        pytest.param(
            {"kind": "gptq", "bits": 8, "block_size": -1}, N + 3 * 4096 + 4 * 4096, id="gptq, rows"
        ),
        pytest.param("awq", N // 2 + 32 * 4096 // 2 + 32 * 4096 * 2, id="awq"),
    ],
)  # fmt: skip
def test_stored_bytes(value: Any, num_bytes: int) -> None:
    assert stored_bytes(read(value)) == num_bytes


def test_a_floating_format_holds_the_same_bytes() -> None:
    plain, stored = read("nf4"), read({"kind": "nf4", "storage_dtype": "bf16"})
    assert stored_bytes(plain) == stored_bytes(stored)
    assert stored.format.codes(8, 64, stored) == ((128, 1), DType.BF16)


def test_every_format_names_its_source_and_its_formula() -> None:
    assert set(QUANTIZED_FORMATS) == set(QuantizationKind)
    for row in QUANTIZED_FORMATS.values():
        assert row.source
        assert row.formula


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nf5", "Did you mean 'nf4'?"),
        ({"bits": 4}, "kind"),
        ({"kind": "nf4", "blocks": 4}, "blocks: no such setting"),
        ({"kind": "nf4", "block_size": 48}, "blocks of 32, 64"),
        ({"kind": "nf4", "bits": 8}, "codes of 4 bits"),
        ({"kind": "int8", "double_quant": True}, "double_quant: int8 has none"),
        ({"kind": "gptq", "storage_dtype": "bf16"}, "quant_storage: gptq"),
        ({"kind": "awq", "compute_dtype": "bf16"}, "compute_dtype: awq"),
        ({"kind": "nf4", "compute_dtype": "fp8"}, "expected one of fp32, bf16, fp16"),
        ({"kind": "nf4", "double_quant": "maybe"}, "true or false"),
        ({"kind": "nf4", "skip_modules": 3}, "names of modules"),
    ],
)
def test_what_cannot_be_is_refused(value: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        read_quantization(value)


def test_what_an_engine_cannot_shard_is_refused() -> None:
    for engine in ({"engine": "fsdp"}, {"engine": "fsdp1"}, {"zero_stage": 3}):
        with pytest.raises(SetupError, match="cannot shard int8"):
            TrainingSetup(num_gpus=8, quantize="int8", **engine)  # type: ignore[arg-type]
        with pytest.raises(SetupError, match="quant_storage"):
            TrainingSetup(
                num_gpus=8, quantize="nf4", engine_options={"quant_storage": "uint8"}, **engine
            )  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="prepare_for_kbit: fsdp1 casts"):
        TrainingSetup(
            num_gpus=8, engine="fsdp1", quantize="nf4",  # type: ignore[arg-type]
            engine_options={"prepare_for_kbit": True},
        )  # fmt: skip


def test_formats_that_nothing_says_are_the_setup_s() -> None:
    setup = TrainingSetup(precision="bf16-autocast", quantize="nf4")  # type: ignore[arg-type]
    how = setup.chosen_quantization
    assert how is not None
    assert (how.compute_dtype, how.storage_dtype) == (DType.BF16, DType.UINT8)
    sharded = TrainingSetup(num_gpus=2, engine="fsdp", quantize="nf4")  # type: ignore[arg-type]
    how = sharded.chosen_quantization
    assert how is not None
    assert how.storage_dtype is DType.BF16


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            "nf4, blocks of 64, double quantization",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4, blocks of 64"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
            "gptq, 4 bits, a scale for each row",
        ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq, groups of 64"),
    ],
)
def test_configs_of_checkpoints(config: dict[str, object], text: str) -> None:
    found = read_quantization_config(config)
    assert str(found) == text
    assert found is not None
    assert found.prequantized


def test_bitsandbytes_computes_in_fp32_where_its_config_says_nothing() -> None:
    found = read_quantization_config({"load_in_4bit": True})
    assert found is not None
    assert found.compute_dtype is DType.FP32


def test_other_methods_are_known_by_name_alone() -> None:
    assert not is_modelled({"quant_method": "mxfp4"})
    assert read_quantization_config({"quant_method": "fp8"}) is None


def test_a_value_takes_plain_words() -> None:
    how = Quantization(kind="nf4", compute_dtype="bf16", prepared=True)  # type: ignore[arg-type]
    assert how.kind is QuantizationKind.NF4
    assert how.compute_dtype is DType.BF16
    assert TrainingSetup(quantize=how).quantize == how
    with pytest.raises(SetupError, match="Did you mean 'nf4'"):
        Quantization(kind="nf3")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8", "gptq", "awq"])
def test_a_calibrated_base_is_loaded_as_the_codes_that_it_is(kind: str) -> None:
    """bitsandbytes makes codes of 16 bits as it loads; GPTQ's and AWQ's were made of samples before."""
    found = TrainingSetup(quantize=kind, adapter="lora").resolve().chosen_quantization  # type: ignore[arg-type]
    assert found is not None
    assert found.prequantized == (kind in ("gptq", "awq"))
