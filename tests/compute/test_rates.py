"""What cards reach: shares of data sheets and of measured products, card by card."""

import pytest

from memplan.compute.rates import Rates, cache_of, rates_of
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.sources.cards.catalog import load_gpu

FLASH, CUDNN, EFFICIENT = (
    OperationKind.FLASH_ATTENTION, OperationKind.CUDNN_ATTENTION, OperationKind.EFFICIENT_ATTENTION,
)  # fmt: skip


def of(name: str) -> Rates:
    return rates_of(load_gpu(name))


@pytest.mark.parametrize(
    ("gpu", "bf16", "fp32"),
    [
        # 0.88 of the best product where one was measured (MAMF, ml-engineering), else 0.7 of the data sheet;
        # in fp32 0.75 of the data sheet [TFLOP/s].
        pytest.param("h100", 0.88 * 794.5, 0.75 * 67, id="H100"),
        pytest.param("a100-80gb", 0.88 * 271.2, 0.75 * 19.5, id="A100"),
        pytest.param("l4", 0.7 * 121, 0.75 * 30.3, id="L4, not measured"),
        pytest.param("v100-32gb", 0.7 * 0.75 / 0.7 * 15.7, 0.75 * 15.7, id="V100: bf16 as fp32"),
    ],
)
def test_products(gpu: str, bf16: float, fp32: float) -> None:
    found = of(gpu)
    assert found.rate_of(DType.BF16) / 1e12 == pytest.approx(bf16)
    assert found.rate_of(DType.FP32) / 1e12 == pytest.approx(fp32)
    assert found.rate_of(DType.INT64) == found.rate_of(DType.FP32)


def test_narrow_formats_and_those_that_a_card_lacks() -> None:
    h100, a100, v100 = of("h100"), of("a100-80gb"), of("v100-32gb")
    assert h100.rate_of(DType.FP8) == h100.rate_of(DType.INT8) > 1.5 * h100.rate_of(DType.BF16)
    assert a100.rate_of(DType.FP8) == a100.rate_of(DType.BF16) == a100.rate_of(DType.FP16)
    assert v100.rate_of(DType.FP16) == pytest.approx(0.7 * 125e12)


def test_memory_and_caches() -> None:
    assert of("h100").bytes_per_s == pytest.approx(0.9 * 3.35e12)
    assert rates_of(None).bytes_per_s == 0.9 * 2_039e9
    assert rates_of(None).rate_of(DType.BF16) == pytest.approx(0.7 * 312e12)
    assert rates_of(None).rate_of(DType.FP32) == pytest.approx(0.75 * 312e12 / 16)
    sizes = {
        name: cache_of(load_gpu(name)).num_bytes >> 20
        for name in ("h100", "a100-80gb", "t4", "v100-32gb", "l4", "b200")
    }
    assert sizes == {"h100": 50, "a100-80gb": 40, "t4": 4, "v100-32gb": 6, "l4": 48, "b200": 126}
    assert cache_of(None).num_bytes == 40 << 20
    assert cache_of(load_gpu("h100")).bytes_per_s == 132 * 38e9


def test_attention_by_architecture() -> None:
    """FlashAttention-2's own figures on an A100 (arXiv:2307.08691), and those measured on an H100 [TFLOP/s]."""
    a100, h100, b200 = of("a100-80gb"), of("h100"), of("b200")
    assert 200 <= a100.attention[FLASH].forward / 1e12 <= 210
    assert 180 <= a100.attention[FLASH].backward / 1e12 <= 190
    assert h100.attention[FLASH].forward / 1e12 == pytest.approx(350, rel=0.02)
    assert h100.attention[FLASH].backward / 1e12 == pytest.approx(310, rel=0.02)
    assert h100.attention[CUDNN].forward / 1e12 == pytest.approx(660, rel=0.01)
    assert h100.attention[EFFICIENT].half_head == 0.90
    assert h100.third_flash.forward == pytest.approx(0.88 * 0.67 * 989.4e12, rel=0.002)
    assert b200.attention[FLASH].forward / h100.attention[FLASH].forward == pytest.approx(
        1, abs=0.1
    )


@pytest.mark.parametrize(("gpu", "measured"), [("gaudi2", 826.5), ("gaudi3", 1289.5)])
def test_products_of_8_bits_hold_what_was_measured_of_them(gpu: str, measured: float) -> None:
    """Not the share of the data sheet that those of 16 bits reach (MAMF, ml-engineering)."""
    assert of(gpu).flops_per_s[DType.FP8] == pytest.approx(0.88 * measured * 1e12)
