"""Encoder-decoders against real training steps of small models.

The figures are those of torch 2.13 and transformers 5.23 on fake CUDA tensors, every storage followed
from its allocation to its release: what the forward pass leaves alive, and both passes' peaks above
what is there between steps.
"""

from collections import Counter
from dataclasses import dataclass

import pytest

from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.memory.step import StepWalk
from memplan.sources.about_models.defaults import class_defaults
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels
from tests.plain_step import plain_step

T5 = {"d_model": 256, "d_ff": 640, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 6,
      "vocab_size": 3000}  # fmt: skip
BART = {
    "d_model": 256, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 512,
    "vocab_size": 3000, "max_position_embeddings": 1024,
}  # fmt: skip

TOLERANCE = 0.0005


@dataclass(frozen=True)
class Setting:
    weights: DType
    autocast: DType | None
    attention: AttentionKernel
    batch_size: int
    seq_len: int
    checkpointed: bool = False


SDPA = Setting(DType.BF16, None, AttentionKernel.SDPA, 2, 512)
EAGER_AMP = Setting(DType.FP32, DType.BF16, AttentionKernel.EAGER, 2, 256)
CHECKPOINTED = Setting(DType.FP32, None, AttentionKernel.SDPA, 1, 512, checkpointed=True)
EAGER_CHECKPOINTED = Setting(DType.BF16, None, AttentionKernel.EAGER, 1, 512, checkpointed=True)
SDPA_AMP = Setting(DType.FP32, DType.BF16, AttentionKernel.SDPA, 2, 512)


def figures(
    model_type: str, sizes: dict[str, int], setting: Setting, target: int
) -> tuple[int, int, int, int]:
    model = read_model(
        {"model_type": model_type, **sizes}, source="x", name="x", defaults=class_defaults()
    )
    options = TapeOptions(
        batch_size=setting.batch_size, seq_len=setting.seq_len, target_seq_len=target,
        weights=setting.weights, compute=setting.weights, autocast=setting.autocast,
        kernels=Kernels(attention=setting.attention), decomposed=True,
        checkpointed_layers=float(setting.checkpointed),
    )  # fmt: skip
    tape = record_model(model, options)
    passes = StepWalk(tape).run()
    step = plain_step(passes)
    loss = tape.segments[-1].output
    assert loss is not None
    leaves = 2 * sum(leaf.storage.num_bytes for leaf in tape.leaves)
    return (
        step.after_forward.total_bytes,
        step.forward_peak.total_bytes,
        step.backward_peak.total_bytes,
        passes.after_backward.total_bytes - loss.storage.num_bytes - leaves,
    )


@pytest.mark.parametrize(
    ("model_type", "setting", "kept", "forward", "backward"),
    [
        ("t5", SDPA, 109_281_280, 115_949_568, 121_569_280),
        ("t5", EAGER_AMP, 102_208_512, 106_853_376, 108_353_024),
        ("t5", CHECKPOINTED, 31_319_040, 39_720_960, 73_960_448),
        ("t5", EAGER_CHECKPOINTED, 17_499_136, 25_958_400, 53_652_480),
        ("t5", SDPA_AMP, 138_702_848, 147_992_576, 150_991_360),
        ("umt5", SDPA, 151_486_464, 158_154_752, 163_774_464),
        ("umt5", EAGER_AMP, 136_221_696, 140_866_560, 142_366_208),
        ("umt5", CHECKPOINTED, 12_444_672, 27_138_048, 51_482_624),
        ("umt5", EAGER_CHECKPOINTED, 8_061_952, 19_666_944, 39_038_464),
        ("plbart", SDPA, 56_274_944, 62_418_944, 68_562_944),
        ("plbart", EAGER_AMP, 87_964_672, 95_182_336, 100_252_672),
        ("plbart", CHECKPOINTED, 11_146_240, 17_290_240, 29_638_656),
        ("m2m_100", SDPA, 47_874_048, 54_018_048, 60_162_048),
        ("m2m_100", EAGER_CHECKPOINTED, 6_231_040, 19_144_704, 35_120_640),
    ],
)
def test_equal_lengths(
    model_type: str, setting: Setting, kept: int, forward: int, backward: int
) -> None:
    sizes = T5 if model_type.endswith("t5") else BART
    found = figures(model_type, sizes, setting, setting.seq_len)
    assert found == pytest.approx((kept, forward, backward, 0), rel=TOLERANCE, abs=16_384)


@pytest.mark.parametrize(
    ("setting", "kept", "forward", "backward"),
    [
        (SDPA, 66_528_256, 68_195_328, 69_600_256),
        (EAGER_AMP, 61_761_024, 63_315_456, 63_297_536),
        (CHECKPOINTED, 13_926_912, 18_494_464, 53_956_608),
    ],
)
def test_labels_of_a_quarter_of_the_length(
    setting: Setting, kept: int, forward: int, backward: int
) -> None:
    found = figures("t5", T5, setting, setting.seq_len // 4)
    assert found == pytest.approx((kept, forward, backward, 0), rel=TOLERANCE, abs=16_384)


def test_the_position_bias_is_made_once_and_its_gradient_summed() -> None:
    """Doubling the layers adds copies of the bias, but no second table nor gradient to keep."""
    shallow = figures("t5", {**T5, "num_layers": 2}, EAGER_AMP, 256)
    deep = figures("t5", {**T5, "num_layers": 3}, EAGER_AMP, 256)
    deeper = figures("t5", {**T5, "num_layers": 4}, EAGER_AMP, 256)
    assert deeper[0] - deep[0] == deep[0] - shallow[0]


def test_fp16_hidden_states_are_clamped_after_each_sublayer() -> None:
    half = Setting(DType.FP16, None, AttentionKernel.SDPA, 2, 512)
    more = figures("t5", T5, half, 512)[0] - figures("t5", T5, SDPA, 512)[0]
    num_sums = 2 * T5["num_layers"] + 3 * T5["num_decoder_layers"]
    assert more == num_sums * 2 * 512 * 256 * 2


def test_the_flash_package_has_no_position_bias() -> None:
    flash = Setting(DType.BF16, None, AttentionKernel.FLASH, 1, 64)
    with pytest.raises(UnsupportedOperationError, match="choose attention sdpa or eager"):
        figures("t5", T5, flash, 64)
    assert figures("bart", BART, flash, 64)[0] > 0


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("t5", T5), ("bart", BART), ("mbart", BART), ("pegasus", BART)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_module_that_is_entered_is_left_behind_what_is_within(
    model_type: str, config: dict[str, object]
) -> None:
    """Hooks stand at both ends of each (stage 3 of ZeRO, offloading): module calls lie within one another."""
    model = read_model(
        {"model_type": model_type, **config}, source="x", name="x", defaults=class_defaults()
    )
    options = TapeOptions(batch_size=2, seq_len=128, target_seq_len=64, compute=DType.BF16)
    entered, left = Counter[str](), Counter[str]()
    for segment in record_model(model, options).segments:
        entered.update(name for _, name in segment.entered)
        left.update(name for _, name in segment.left)
        assert left <= entered, segment.name
    assert {"encoder", "decoder"} <= {name.rpartition(".")[2] for name in entered}
    assert left == entered
