"""ZeRO++'s second set of shards (``zero_hpz_partition_size``), as DeepSpeed 0.19.8 allocated it.

PyTorch's CUDA build and DeepSpeed's own code on a card that is not there, rank 0 of 16, four steps.
"""

from typing import Any

import pytest

import memplan
from memplan.errors import SetupError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
AT_ONCE = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}


def estimated(**options: object) -> memplan.Estimate:
    setup = memplan.TrainingSetup(
        engine="deepspeed", zero_stage=3, num_gpus=16, precision="bf16-master", seq_len=512,  # type: ignore[arg-type]
        engine_options={"zero_init": False, **options},
    )  # fmt: skip
    return memplan.estimate(LLAMA, setup, gpu="h100")


def test_where_parameters_stay_gathered_only_loading_has_them() -> None:
    plain, second = estimated(), estimated(zero_hpz_partition_size=8)
    assert second.peak_bytes == plain.peak_bytes == pytest.approx(1698729821, rel=3e-5)
    assert second.phases["load"].peak_bytes > plain.phases["load"].peak_bytes


def test_where_they_are_let_go_each_has_a_shard_until_the_step() -> None:
    plain, second = estimated(**AT_ONCE), estimated(zero_hpz_partition_size=8, **AT_ONCE)
    assert second.peak_bytes == pytest.approx(1501466461, rel=3e-5)
    assert second.held_bytes == plain.held_bytes, "they go with the step"
    more = second.phases["backward"].components["parameters"]
    more -= plain.phases["backward"].components["parameters"]
    assert more == pytest.approx(2 * plain.num_params / 8, rel=3e-4)


def test_what_is_no_divisor_of_the_ranks_is_refused() -> None:
    with pytest.raises(SetupError, match="16 ranks are no multiple of 7"):
        estimated(zero_hpz_partition_size=7)
