"""Parameter counts, against transformers' own over every config of a supported type."""

from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.graph.counts import count_parameters
from memplan.sources.models import load_model
from tests.accuracy.comparison import read_records, remember

FIGURES = {
    "total_params": "total",
    "base_model_params": "base",
    "largest_layer_params": "largest_layer",
    "largest_layer_params_unfused": "largest_layer_unfused",
    "active_params": "active",
}

# The folding trunk is a model of its own, and no language model.
NOT_A_LANGUAGE_MODEL = {"facebook__esmfold_v1"}

# The total holds the output matrix apart already; the record adds it once more.
UNTIED_ANYWAY = {"facebook__wmt19-en-ru"}

MAIN_TYPES = frozenset(
    {
        "gpt2", "gpt_neox", "opt", "bloom", "llama", "mistral", "mixtral", "qwen2", "qwen3",
        "gemma", "gemma2", "phi3", "t5", "mt5", "bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
    }
)  # fmt: skip


# Classes of the data sets these were trained on (COCO's two countings, Pascal VOC, ADE20K), which
# the records' configs, cut down, have lost.
NUM_CLASSES = {
    "roboflow__rf-detr-base": 91,
    "annazhang__lwdetr_large_60e_coco": 91,
    "ustc-community__dfine-large-coco": 80,
    "apple__deeplabv3-mobilevit-small": 21,
    "openmmlab__upernet-convnext-base": 150,
}


def num_labels(record: dict[str, Any]) -> int | None:
    """The labels of a classification head whose config, cut down in the record, has lost them.

    What is left of the truth once the body is taken away is a whole number of labels' weights.
    """
    if record["name"] in NUM_CLASSES:
        return NUM_CLASSES[record["name"]]
    config = record["config"]
    classifies = "Classification" in record["truth"]["task_class"]
    if not classifies or "id2label" in config or "num_labels" in config:
        return None
    one, two = (count_parameters(load_model(config, num_labels=n)).total for n in (1, 2))
    missing = record["truth"]["total_params"] - one
    return 1 + missing // (two - one) if two > one and missing % (two - one) == 0 else None


# Its total holds the output matrix apart already, and the record's untied total adds it again.
UNTIED_ANYWAY = {"facebook__wmt19-en-ru"}
LANGUAGE_TASKS = (
    "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForSequenceClassification",
    "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
)  # fmt: skip
REFUSED = "refused: "
TOWERS = ("vision_config", "audio_config", "speech_config", "vit_config")


def is_text(record: dict[str, Any]) -> bool:
    """A language model or text classifier without a tower."""
    task_class = record["truth"]["task_class"]
    return task_class.endswith(LANGUAGE_TASKS) and not any(
        key in record["config"] for key in TOWERS
    )


def differences(record: dict[str, Any]) -> list[str]:
    """Every figure that is not transformers' own; a refusal is one."""
    try:
        model = load_model(record["config"], num_labels=num_labels(record))
    except MemplanError as error:
        return [f"{REFUSED}{error}"]
    counts, truth = count_parameters(model), record["truth"]
    found = {figure: getattr(counts, attribute) for figure, attribute in FIGURES.items()}
    if truth.get("tie_suspect") and record["name"] not in UNTIED_ANYWAY:
        found["total_params_if_untied"] = counts.untied
    return [
        f"{figure} {value:,}, not {truth[figure]:,}"
        for figure, value in found.items()
        if truth.get(figure) is not None and value != truth[figure]
    ]


def is_refused(wrong: list[str]) -> bool:
    """Whether a config was refused rather than counted differently."""
    return any(line.startswith(REFUSED) for line in wrong)


@pytest.mark.reference
def test_counts(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        record
        for record in read_records(reference_dir / "hf_configs.jsonl")
        if record["truth"]["status"] == "ok"
    ]
    off = {record["name"]: wrong for record in records if (wrong := differences(record))}
    types = {record["model_type"] for record in records}
    refused = {r["model_type"] for r in records if is_refused(off.get(r["name"], []))}
    exact_types = types - {r["model_type"] for r in records if r["name"] in off}
    text = [record["name"] for record in records if is_text(record)]
    with capsys.disabled():
        print(
            f"\nhf_configs.jsonl: {len(records) - len(off)} of {len(records)} configs exact, "
            f"{len(text) - len(off.keys() & set(text))} of {len(text)} text models; of {len(types)} "
            f"types {len(exact_types)} exact, {len(types - exact_types - refused)} off, "
            f"{len(refused)} unsupported"
        )
        for name, wrong in off.items():
            print(f"  {name}: {'; '.join(wrong)}")
    assert {name for name in text if name in off} <= NOT_A_LANGUAGE_MODEL
    assert len(off) <= 0.05 * len(records)
    assert exact_types >= MAIN_TYPES
    remember(
        "parameter counts",
        {
            "total, base model, largest layer": {
                "records": len(records),
                "exact": len(records) - len(off),
                "types": len(types),
                "exact_types": len(exact_types),
                "types_off": len(types - exact_types - refused),
                "types_unsupported": len(refused),
                "text": len(text),
                "exact_text": len(text) - len(off.keys() & set(text)),
            }
        },
        update=pytestconfig.getoption("--update-accuracy"),
    )


def test_both_totals_where_the_file_is_ambiguous() -> None:
    """flan-T5 is tied by transformers 5; the published checkpoint holds both matrices."""
    counts = count_parameters(load_model("flan-t5-base"))
    assert (counts.total, counts.untied) == (222_903_552, 247_577_856)
