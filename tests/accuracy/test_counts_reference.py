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

OUTPUT_IS_AN_EMBEDDING = "not get_input_embeddings()"
"""In a record's notes: what the record took for the head is the decoder's embedding (FSMT's
``get_output_embeddings``), so its untied total adds a matrix that the total holds apart already."""

MAIN_TYPES = frozenset(
    {
        "gpt2", "gpt_neox", "opt", "bloom", "llama", "mistral", "mixtral", "qwen2", "qwen3",
        "gemma", "gemma2", "phi3", "t5", "mt5", "bert", "roberta", "xlm-roberta", "xlm-roberta-xl",
    }
)  # fmt: skip

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
        model = load_model(record["config"], num_labels=record.get("num_labels"))
    except MemplanError as error:
        return [f"{REFUSED}{error}"]
    counts, truth = count_parameters(model), record["truth"]
    found = {figure: getattr(counts, attribute) for figure, attribute in FIGURES.items()}
    if truth.get("tie_suspect") and OUTPUT_IS_AN_EMBEDDING not in truth["notes"]:
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
    assert not off.keys() & set(text)
    assert all(is_refused(wrong) for wrong in off.values())
    assert len(off) <= 0.005 * len(records)
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
