"""LXMERT, VisualBERT and FLAVA: counts, heads, and what is frozen."""

import pytest

from memplan.errors import ConfigError
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.graph.module_names import named_modules
from memplan.model.spec import Task
from tests.families.reading import counted, read, trained

BERT = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
    "num_hidden_layers": 3, "max_position_embeddings": 130,
}  # fmt: skip
LXMERT = {
    "model_type": "lxmert", **BERT, "l_layers": 2, "r_layers": 1, "x_layers": 2,
    "visual_feat_dim": 20, "num_qa_labels": 30, "num_object_labels": 12, "num_attr_labels": 11,
}  # fmt: skip
VISUAL = {"model_type": "visual_bert", **BERT, "visual_embedding_dim": 20}
FLAVA = {
    "model_type": "flava",
    "text_config": {**BERT, "num_hidden_layers": 2, "vocab_size": 500,
                    "max_position_embeddings": 512},
    "image_config": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                     "intermediate_size": 96, "image_size": 32, "patch_size": 8, "vocab_size": 60,
                     "qkv_bias": False},
    "multimodal_config": {"hidden_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
                          "intermediate_size": 96},
    "image_codebook_config": {"hidden_size": 16, "num_blocks_per_group": 1, "vocab_size": 60},
    "projection_dim": 24, "hidden_size": 80,
}  # fmt: skip


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "task", "total", "largest"),
    [
        (LXMERT, Task.BASE, 346_496, 64_000),
        (LXMERT, Task.QUESTION_ANSWERING, 358_942, 64_000),
        (LXMERT, Task.PRETRAINING, 371_443, 64_000),
        (VISUAL, Task.BASE, 186_944, 64_000),
        (VISUAL, Task.PRETRAINING, 192_362, 65_000),
        (VISUAL, Task.OTHER, 187_074, 64_000),
        (FLAVA, Task.BASE, 228_049, 32_768),
        (FLAVA, Task.PRETRAINING, 395_235, 32_768),
    ],
)
def test_counts(config: dict[str, object], task: Task, total: int, largest: int) -> None:
    assert counted(config, task) == (total, largest)


@pytest.mark.parametrize(
    ("config", "grows"),
    [(LXMERT, 64_000), (VISUAL, 65_000), (FLAVA, 2 * (500 + 60))],
    ids=["lxmert", "visual_bert", "flava"],
)
def test_untied(config: dict[str, object], grows: int) -> None:
    """FLAVA ties no matrix, but each head's bias to its output matrix's."""
    untied = {**config, "tie_word_embeddings": False}
    assert counted(untied)[0] == counted(config)[0] + grows


def test_flava_from_its_defaults() -> None:
    """The module that owns the most is an output matrix with the bias that is its head's too."""
    counts = count_parameters(read({"model_type": "flava"}))
    assert (counts.total, counts.base) == (357_645_303, 241_356_289)
    assert counts.largest_layer == 30_522 * 768 + 30_522


def test_none_of_flavas_matrices_gives_the_logits() -> None:
    """``get_output_embeddings`` finds none: adapters of all linear layers stand beside its heads' too."""
    model = read(FLAVA, Task.PRETRAINING)
    named = named_modules(model, record_model(model, TapeOptions()))
    assert "mlm_head.decoder" in {each.name for each in named}
    assert not any(each.is_output for each in named)


def test_flavas_codebook_is_frozen_unless_the_config_says_so() -> None:
    assert counted(FLAVA)[0] - trained(FLAVA) == 76_192
    book = {**FLAVA["image_codebook_config"], "freeze": False}  # type: ignore[dict-item]
    assert trained({**FLAVA, "image_codebook_config": book}) == counted(FLAVA)[0]


def test_visual_reasoning_is_named_by_its_class() -> None:
    model = read({**VISUAL, "architectures": ["VisualBertForVisualReasoning"]})
    assert model.task is Task.OTHER


def test_bypassing_adds_a_layer() -> None:
    plain = counted(VISUAL)[0]
    assert counted({**VISUAL, "bypass_transformer": True})[0] > plain


def test_heads_that_do_not_divide_lxmerts_width_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"hidden_size: 64 is not divisible by num_attention_heads"
    ):
        read({**LXMERT, "num_attention_heads": 5})


def test_lxmerts_losses_bring_their_heads() -> None:
    config = {**LXMERT, "task_qa": False, "visual_attr_loss": False}
    answers = 64 * 128 + 128 + 2 * 128 + 128 * 30 + 30
    assert counted(LXMERT)[0] - counted(config)[0] == answers + 11 * 65
