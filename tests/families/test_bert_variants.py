"""BERT's nearer relatives: counts for every task, and what each replaces.

Their activations are among ``tests/data/activations.jsonl``.
"""

import pytest

from memplan.errors import ConfigError, SetupError
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.model.spec import Task
from tests.families.reading import counted, read

BERT: dict[str, object] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
    "num_hidden_layers": 3, "max_position_embeddings": 130, "type_vocab_size": 2,
    "pad_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "roberta-prelayernorm": BERT,
    "rembert": {**BERT, "input_embedding_size": 32, "output_embedding_size": 48},
    "roc_bert": {
        **BERT, "pronunciation_vocab_size": 30, "shape_vocab_size": 40,
        "pronunciation_embed_dim": 16, "shape_embed_dim": 24,
    },
    "mpnet": BERT,
    "dpr": BERT,
}  # fmt: skip
SEQUENCES, TOKENS = Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION


def config_of(model_type: str) -> dict[str, object]:
    return {"model_type": model_type, **CONFIGS[model_type]}


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("model_type", "task", "total", "largest"),
    [
        ("roberta-prelayernorm", Task.BASE, 177_280, 64_000),
        ("roberta-prelayernorm", Task.MASKED_LM, 178_408, 65_000),
        ("roberta-prelayernorm", SEQUENCES, 177_410, 64_000),
        ("roberta-prelayernorm", TOKENS, 173_250, 64_000),
        ("rembert", Task.BASE, 142_976, 32_000),
        ("rembert", Task.MASKED_LM, 191_032, 49_000),
        ("rembert", SEQUENCES, 143_106, 32_000),
        ("rembert", TOKENS, 138_946, 32_000),
        ("roc_bert", Task.BASE, 185_312, 64_000),
        ("roc_bert", Task.MASKED_LM, 186_440, 65_000),
        ("roc_bert", SEQUENCES, 185_442, 64_000),
        ("mpnet", Task.BASE, 177_152, 64_000),
        ("mpnet", Task.MASKED_LM, 178_280, 65_000),
        ("mpnet", SEQUENCES, 177_282, 64_000),
        ("mpnet", TOKENS, 173_122, 64_000),
        ("dpr", Task.BASE, 172_992, 64_000),
    ],
)
def test_counts(model_type: str, task: Task, total: int, largest: int) -> None:
    assert counted(config_of(model_type), task) == (total, largest)


def test_published_counts() -> None:
    """Of google/rembert: narrow tables in, wide and untied ones out."""
    assert counted({"model_type": "rembert"}) == (993_263_548, 416_749_500)


def test_dpr_has_no_task_but_the_base_model() -> None:
    assert read({**config_of("dpr"), "architectures": ["DPRContextEncoder"]}).task is Task.BASE
    with pytest.raises(ConfigError, match="has no task 'masked-lm'"):
        read(config_of("dpr"), Task.MASKED_LM)


def test_mpnet_ignores_token_types() -> None:
    assert counted({**config_of("mpnet"), "type_vocab_size": 7}) == counted(config_of("mpnet"))


def test_mpnet_cannot_be_checkpointed() -> None:
    options = TapeOptions(seq_len=16, checkpointed_layers=1.0)
    with pytest.raises(SetupError, match="cannot checkpoint"):
        record_model(read(config_of("mpnet")), options)


def test_mpnets_bias_is_written_out_for_every_sequence() -> None:
    one, three = (
        next(
            operation.outputs[0].numel
            for segment in record_model(
                read(config_of("mpnet")), TapeOptions(batch_size=batch, seq_len=16)
            ).segments
            for operation in segment.operations
            if operation.name == "clone"
        )
        for batch in (1, 3)
    )
    assert (one, three) == (4 * 16 * 16, 3 * 4 * 16 * 16)


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        ("rembert", {"tie_word_embeddings": True}, "cannot tie unequal input_embedding_size"),
        ("roc_bert", {"concat_input": False}, "concat_input: only true"),
        ("roc_bert", {"enable_shape": False}, "enable_shape: only true"),
        ("dpr", {"projection_dim": 8}, "projection_dim: only 0"),
    ],
)
def test_what_is_refused(model_type: str, changed: dict[str, object], message: str) -> None:
    config = {**config_of(model_type), **changed}
    with pytest.raises(ConfigError, match=message):
        read(config)
