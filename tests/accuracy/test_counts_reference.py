"""Parameter counts, against transformers' own over every config of a supported type."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memplan.graph.counts import count_parameters
from memplan.graph.families import supported_families
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


def num_labels(record: dict[str, Any]) -> int | None:
    """The labels of a classification head whose config, cut down in the record, has lost them.

    What is left of the truth once the body is taken away is a whole number of labels' weights.
    """
    config = record["config"]
    classifies = "Classification" in record["truth"]["task_class"]
    if not classifies or "id2label" in config or "num_labels" in config:
        return None
    one, two = (count_parameters(load_model(config, num_labels=n)).total for n in (1, 2))
    missing = record["truth"]["total_params"] - one
    return 1 + missing // (two - one) if two > one and missing % (two - one) == 0 else None


def supported(record: dict[str, Any]) -> bool:
    return (
        record["model_type"] in supported_families()
        and record["truth"]["status"] == "ok"
        and record["name"] not in NOT_A_LANGUAGE_MODEL
    )


@pytest.mark.reference
def test_counts(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    off: list[str] = []
    exact: Counter[str] = Counter()
    records = [r for r in read_records(reference_dir / "hf_configs.jsonl") if supported(r)]
    for record in records:
        model = load_model(record["config"], num_labels=num_labels(record))
        counts = count_parameters(model)
        for figure, attribute in FIGURES.items():
            found, wanted = getattr(counts, attribute), record["truth"].get(figure)
            if wanted is not None and found != wanted:
                off.append(f"{record['name']}: {figure} {found}, not {wanted}")
        untied = record["truth"].get("total_params_if_untied")
        suspect = record["truth"].get("tie_suspect") and record["name"] not in UNTIED_ANYWAY
        if suspect and counts.untied != untied:
            off.append(f"{record['name']}: untied {counts.untied}, not {untied}")
        exact[record["model_type"]] += 1
    with capsys.disabled():
        print(f"\nhf_configs.jsonl: {len(records)} configs of {len(exact)} types, {len(off)} off")
    assert not off, "\n".join(off)
    assert set(exact) >= MAIN_TYPES
    remember(
        "parameter counts",
        {"total, base model, largest layer": {"records": len(records), "types": len(exact),
                                              "off": len(off)}},
        update=pytestconfig.getoption("--update-accuracy"),
    )  # fmt: skip


def test_both_totals_where_the_file_is_ambiguous() -> None:
    """flan-T5 is tied by transformers 5; the published checkpoint holds both matrices."""
    counts = count_parameters(load_model("flan-t5-base"))
    assert (counts.total, counts.untied) == (222_903_552, 247_577_856)
