"""The order of parameters, against ``named_parameters()`` of transformers 5.23's own classes."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.graph.core.options import TapeOptions
from memplan.graph.declaration import declared_parameters
from memplan.graph.model import record_model
from memplan.graph.module_names import named_modules
from memplan.sources.models import load_model
from tests.accuracy.comparison import read_records

DATA = json.loads(
    (Path(__file__).parents[1] / "data" / "parameter_order.json").read_text(encoding="utf-8")
)


def order_of(
    config: dict[str, Any], task: str | None = None, num_labels: int | None = None
) -> list[int]:
    """Elements of every parameter, in the order of the flat buffer."""
    tape = record_model(load_model(config, task, num_labels=num_labels), TapeOptions())
    return [
        each.numel
        for segment, parameters in declared_parameters(tape)
        for each in parameters * segment.num_copies
    ]


@pytest.mark.parametrize(
    "model", DATA["models"], ids=[each["config"]["model_type"] for each in DATA["models"]]
)
def test_declared_order(model: dict[str, Any]) -> None:
    assert order_of(model["config"], model["task"]) == model["numels"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_names_in_a_head_that_owns_its_bias(tied: bool) -> None:
    """transformers 5.23, ``BertForMaskedLM.named_modules()``: those of ``cls`` that own weights."""
    config = {"model_type": "bert", "num_hidden_layers": 1, "tie_word_embeddings": tied}
    model = load_model(config, "masked-lm")
    tape = record_model(model, TapeOptions())
    names = {each.name for each in named_modules(model, tape) if each.segment == "head"}
    inside = {"transform.dense", "transform.LayerNorm"}
    assert names >= {"cls.predictions", *(f"cls.predictions.{each}" for each in inside)}
    assert not any(each.startswith(("predictions", "transform")) for each in names)


def test_the_final_norm_of_opt_comes_before_its_layers() -> None:
    tape = record_model(load_model("opt-125m"), TapeOptions())
    names = [part[0] for part in tape.declared]
    assert names.index("decoder.norm") < names.index("decoder.layers")


def test_a_type_without_an_order_declares_its_norms_last() -> None:
    tape = record_model(load_model("llama-3.2-1b"), TapeOptions())
    layer = next(each for segment, each in declared_parameters(tape) if segment.is_layer)
    assert [each.module for each in layer][-2:] == ["input_layernorm", "post_attention_layernorm"]


@pytest.mark.reference
def test_every_type(reference_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checksums = DATA["checksums"]
    wrong, known = [], 0
    for record in read_records(reference_dir / "hf_configs.jsonl"):
        if record["name"] not in checksums:
            continue
        num_labels = record.get("num_labels") or record["truth"].get("num_labels")
        try:
            numels = order_of(record["config"], None, num_labels)
        except MemplanError:
            continue
        known += 1
        if zlib.crc32(",".join(map(str, numels)).encode()) != checksums[record["name"]]:
            wrong.append(record["model_type"])
    with capsys.disabled():
        print(
            f"\nnamed_parameters(): {known - len(wrong)} of {known} types; not {', '.join(wrong)}"
        )
    assert known >= 240
    assert len(wrong) <= 30
