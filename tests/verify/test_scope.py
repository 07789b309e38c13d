"""Every field of a setup is run by ``memplan verify``, or refused by name."""

from dataclasses import fields

import pytest

from memplan.errors import SetupError
from memplan.training.setup import TrainingSetup
from memplan.verify.scope import RUN, check_scope
from tests.test_every_field import FIELDS

REFUSED = {
    "packing": {"packing": "documents", "micro_batch_size": 2},
    "freeze": {"freeze": "embeddings"},
    "compile": {"compile": "layer"},
    "loss": {"loss": "fused_linear"},
    "precision": {"precision": "fp16-amp"},
    "checkpointing": {"checkpointing": "selective"},
    "tensor_parallel": {"tensor_parallel": 2, "num_gpus": 2, "engine": "fsdp"},
    "engine": {"engine": "megatron", "num_gpus": 8},
    "job": {"job": "dpo"},
    "adapter": {"adapter": {"lora": {"rank": 4}}, "engine": "fsdp", "num_gpus": 8},
}


def test_every_field_has_a_rule() -> None:
    assert RUN.keys() == {field.name for field in fields(TrainingSetup)} == FIELDS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    setup = TrainingSetup(**REFUSED[name]).resolve(512)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=rf"^{name}: verify cannot run this yet"):
        check_scope(setup, has_gpu=True)


def test_what_is_run() -> None:
    for values in (
        {}, {"precision": "fp32", "attention": "eager"}, {"checkpointing": "0-3"},
        {"num_gpus": 8, "engine": "fsdp"}, {"num_gpus": 8, "zero_stage": 3},
        {"adapter": {"lora": {"rank": 4}}},
    ):  # fmt: skip
        check_scope(TrainingSetup(**values).resolve(512), has_gpu=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_gpus": 8, "zero_stage": 2}, "engine: DeepSpeed's ranks are real processes"),
        ({"num_gpus": 8, "engine": "ddp"}, "engine: DDP's reducer reads real tensors"),
        ({"attention": "flash"}, "attention: the flash-attention package"),
    ],
)
def test_without_a_gpu(values: dict[str, object], told: str) -> None:
    with pytest.raises(SetupError, match=told):
        check_scope(TrainingSetup(**values).resolve(512), has_gpu=False)  # type: ignore[arg-type]
