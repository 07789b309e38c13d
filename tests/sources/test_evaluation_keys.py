"""Evaluation as files of the usual stacks ask for it, and as the command line does."""

from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.sources.emitters.training_arguments import emit
from memplan.sources.stacks import read_stack, stack_of
from memplan.sources.training_arguments import arguments_file
from memplan.training.evaluation import Evaluation
from memplan.training.setup import TrainingSetup


def read(**values: Any) -> Evaluation | None:
    return arguments_file(values, source="example").setup.evaluation


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"eval_strategy": "no", "per_device_eval_batch_size": 64},
        {"eval_strategy": "no", "do_eval": True},
        {"do_eval": True, "eval_accumulation_steps": 4},
        {"per_device_eval_batch_size": 64},
    ],
)
def test_nothing_is_counted_where_nothing_asks_for_it(values: dict[str, Any]) -> None:
    assert read(**values) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eval_strategy": "steps"}, "8"),
        ({"evaluation_strategy": "epoch", "per_device_eval_batch_size": 2}, "2"),
        ({"eval_on_start": True, "per_gpu_eval_batch_size": 3}, "3"),
        (
            {"eval_strategy": "steps", "eval_accumulation_steps": 4},
            "8:batches_kept=4,accumulation_steps=4",
        ),
        (
            {
                "eval_strategy": "steps",
                "eval_accumulation_steps": 4,
                "prediction_loss_only": True,
            },
            "8:accumulation_steps=4",
        ),
        (
            {"eval_strategy": "steps", "batch_eval_metrics": True},
            "8:batches_kept=1,accumulation_steps=1",
        ),
    ],
)
def test_as_the_trainer_reads_it(values: dict[str, Any], expected: str) -> None:
    assert str(read(**values)) == expected
    notes = arguments_file(values, source="example").notes
    assert any(each.startswith("evaluation in batches of") for each in notes)


AXOLOTL = {"base_model": "Qwen/Qwen2.5-0.5B", "sequence_len": 512, "micro_batch_size": 2}
TORCHTUNE = {
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "batch_size": 2,
    "dataset_val": {"_component_": "torchtune.datasets.alpaca_dataset"},
}  # fmt: skip
LLAMA_FACTORY = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B", "stage": "sft", "finetuning_type": "full",
    "template": "qwen", "dataset": "identity", "cutoff_len": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**AXOLOTL, "val_set_size": 0.05}, None),
        ({**AXOLOTL, "val_set_size": 0.05, "eval_steps": 10}, "2:accumulation_steps=1"),
        ({**AXOLOTL, "val_set_size": 0, "evals_per_epoch": 4}, None),
        (
            {
                **AXOLOTL,
                "val_set_size": 0.1,
                "evals_per_epoch": 4,
                "eval_batch_size": 6,
                "gradient_accumulation_steps": 4,
            },
            "6:accumulation_steps=4",
        ),
        ({**TORCHTUNE}, None),
        ({**TORCHTUNE, "run_val_every_n_steps": 50}, "2"),
        ({**TORCHTUNE, "run_val_every_n_steps": 50, "batch_size_val": 5}, "5"),
        ({**LLAMA_FACTORY, "val_size": 0.1, "eval_strategy": "no"}, None),
        (
            {
                **LLAMA_FACTORY,
                "val_size": 0.1,
                "eval_strategy": "steps",
                "per_device_eval_batch_size": 4,
            },
            "4",
        ),
    ],
)
def test_as_a_stack_has_it(values: dict[str, Any], expected: str | None) -> None:
    stack = stack_of(values)
    assert stack is not None
    found = read_stack(values, stack, source="example").setup.evaluation
    assert (None if found is None else str(found)) == expected


def test_arguments_that_are_written_are_read_again() -> None:
    for text in ("8", "8:batches_kept=4,accumulation_steps=4", "8:accumulation_steps=4"):
        values = emit(TrainingSetup(evaluation=text, precision="bf16-amp")).values  # type: ignore[arg-type]
        assert str(read(**values)) == text
    with pytest.raises(SetupError, match="accumulation_steps=3"):
        emit(TrainingSetup(evaluation="8:batches_kept=3"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "batch_size: must be a whole number from 1 up"),
        ("8:kept=3", "no such setting"),
        ({"batches_kept": 3}, "batch_size: is missing"),
        (True, "batch_size: must be a whole number"),
        ("8:batches_kept", "batches_kept: must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(value: object, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        TrainingSetup(evaluation=value)  # type: ignore[arg-type]
