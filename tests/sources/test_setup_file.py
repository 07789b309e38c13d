from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.sources.setup_file import read_setup, setup_from_mapping
from memplan.training.setup import TrainingSetup


def test_a_file_is_the_setup_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text(
        "name: mine\nnum_gpus: 16\nengine: deepspeed\nzero_stage: 3\nfreeze: embeddings\n"
        "checkpointing: 0.5\nengine_options: {overlap_comm: true}\nseq_len: null\n"
    )
    assert read_setup(path) == TrainingSetup(
        num_gpus=16, engine="deepspeed", zero_stage=3, freeze="embeddings", checkpointing=0.5,
        engine_options={"overlap_comm": True},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param(
            {"micro_batch": 2}, "micro_batch: no such .* 'micro_batch_size'", id="unknown"
        ),
        pytest.param({"zzz": 2}, "There are: num_gpus, ", id="far"),
        pytest.param({"micro_batch_size": 1.5}, "whole number", id="fraction"),
        pytest.param({"micro_batch_size": "4"}, "whole number", id="text"),
        pytest.param({"num_gpus": None}, "is empty", id="empty"),
        pytest.param({"upcast_outputs": "yes"}, "true or false", id="flag"),
        pytest.param({"dropout": "much"}, "probability", id="dropout"),
        pytest.param({"dropout": True}, "probability", id="dropout flag"),
        pytest.param({"freeze": 3}, "write text", id="freeze"),
        pytest.param({"kernels": {"norm": "fused"}}, "write text", id="kernels"),
        pytest.param({"engine_options": [1]}, "write a mapping", id="options"),
        pytest.param({"zero_stage": [2, 3]}, "one value, not a list", id="list"),
        pytest.param({"precision": "bf17"}, "'bf16'", id="enum"),
        pytest.param({"num_gpus": 3, "num_nodes": 2}, "evenly over 2 nodes", id="contradiction"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^my.yaml: .*{message}"):
        setup_from_mapping(values, source="my.yaml")
