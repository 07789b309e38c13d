"""Encoders that are counted: each type's weights, heads, poolers and ties."""

import pytest

from memplan.errors import ConfigError
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.model.spec import Task
from tests.families.reading import counted, read

BERT: dict[str, object] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
    "num_hidden_layers": 3, "max_position_embeddings": 130, "type_vocab_size": 2,
    "pad_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "big_bird": BERT,
    "longformer": BERT,
    "xmod": {**BERT, "languages": ["a", "b", "c"], "pre_norm": True, "adapter_layer_norm": True},
    "luke": {**BERT, "entity_vocab_size": 50, "entity_emb_size": 32},
    "lilt": {**BERT, "max_2d_position_embeddings": 40, "hidden_size": 96},
    "convbert": {**BERT, "embedding_size": 32, "num_groups": 2},
    "squeezebert": {**BERT, "embedding_size": 64, "q_groups": 2},
    "fnet": BERT,
    "funnel": {
        "d_model": 64, "n_head": 4, "d_head": 8, "d_inner": 128, "vocab_size": 1000,
        "block_sizes": [2, 3], "block_repeats": [1, 2], "num_decoder_layers": 2,
    },
    "xlnet": {"d_model": 64, "n_head": 4, "d_inner": 128, "n_layer": 3, "vocab_size": 1000},
}  # fmt: skip
SEQUENCES, TOKENS = Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION


def config_of(model_type: str) -> dict[str, object]:
    return {"model_type": model_type, **CONFIGS[model_type]}


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("model_type", "task", "total", "largest"),
    [
        ("big_bird", Task.BASE, 177_152, 64_000),
        ("big_bird", Task.MASKED_LM, 182_440, 65_000),
        ("big_bird", Task.PRETRAINING, 182_570, 65_000),
        ("big_bird", SEQUENCES, 181_442, 64_000),
        ("big_bird", TOKENS, 177_282, 64_000),
        ("big_bird", Task.QUESTION_ANSWERING, 189_826, 64_000),
        ("longformer", Task.BASE, 214_592, 64_000),
        ("longformer", Task.MASKED_LM, 215_720, 65_000),
        ("longformer", SEQUENCES, 214_722, 64_000),
        ("longformer", Task.QUESTION_ANSWERING, 210_562, 64_000),
        ("longformer", Task.MULTIPLE_CHOICE, 214_657, 64_000),
        ("xmod", Task.BASE, 215_392, 64_000),
        ("xmod", Task.MASKED_LM, 216_520, 65_000),
        ("xmod", SEQUENCES, 215_522, 64_000),
        ("luke", Task.BASE, 226_816, 64_000),
        ("luke", Task.MASKED_LM, 298_298, 65_000),
        ("luke", TOKENS, 222_786, 64_000),
        ("luke", Task.MULTIPLE_CHOICE, 226_881, 64_000),
        ("lilt", Task.BASE, 325_792, 96_000),
        ("lilt", SEQUENCES, 325_986, 96_000),
        ("lilt", TOKENS, 316_674, 96_000),
        ("convbert", Task.BASE, 111_510, 32_000),
        ("convbert", Task.MASKED_LM, 114_654, 33_000),
        ("convbert", SEQUENCES, 115_800, 32_000),
        ("squeezebert", Task.BASE, 115_712, 64_000),
        ("squeezebert", Task.MASKED_LM, 121_000, 65_000),
        ("squeezebert", SEQUENCES, 115_842, 64_000),
        ("fnet", Task.BASE, 131_392, 64_000),
        ("fnet", Task.MASKED_LM, 136_680, 65_000),
        ("fnet", Task.PRETRAINING, 136_810, 65_000),
        ("fnet", SEQUENCES, 131_522, 64_000),
        ("funnel", Task.MASKED_LM, 256_648, 65_000),
        ("funnel", Task.PRETRAINING, 259_873, 64_000),
        ("funnel", SEQUENCES, 205_218, 64_000),
        ("funnel", TOKENS, 255_778, 64_000),
        ("xlnet", Task.BASE, 176_960, 64_000),
        ("xlnet", Task.CAUSAL_LM, 177_960, 65_000),
        ("xlnet", SEQUENCES, 181_250, 64_000),
    ],
)
def test_counts(model_type: str, task: Task, total: int, largest: int) -> None:
    assert counted(config_of(model_type), task) == (total, largest)


@pytest.mark.parametrize(
    ("model_type", "changed", "task", "total"),
    [
        pytest.param("big_bird", {"use_bias": False}, Task.BASE, 176_576, id="no-biases"),
        pytest.param(
            "luke", {"entity_emb_size": 64, "use_entity_aware_attention": False}, Task.BASE,
            188_928, id="entities-as-wide-as-words",
        ),
        pytest.param(
            "convbert", {"embedding_size": 64, "num_groups": 1, "head_ratio": 8,
                         "conv_kernel_size": 7},
            Task.MASKED_LM, 174_077, id="one-head-left",
        ),
        pytest.param(
            "xmod", {"languages": ["a"], "pre_norm": False, "adapter_layer_norm": False},
            Task.MASKED_LM, 190_856, id="one-language",
        ),
    ],
)  # fmt: skip
def test_options(model_type: str, changed: dict[str, object], task: Task, total: int) -> None:
    assert counted({**config_of(model_type), **changed}, task)[0] == total


@pytest.mark.parametrize(
    ("model_type", "grows"),
    [
        ("big_bird", 65_000),
        ("longformer", 65_000),
        ("xmod", 65_000),
        ("squeezebert", 65_000),
        ("fnet", 65_000),
        ("luke", 1_000 + 50 * 32),
        ("convbert", 32_000),
        ("funnel", 64_000),
    ],
)
def test_untied_heads_may_keep_a_bias_of_their_own(model_type: str, grows: int) -> None:
    """LUKE's words are never tied, its entities are; ConvBERT and Funnel have no spare bias."""
    tied = counted(config_of(model_type), Task.MASKED_LM)[0]
    untied = {**config_of(model_type), "tie_word_embeddings": False}
    assert counted(untied, Task.MASKED_LM)[0] == tied + grows


def test_funnel_repeats_layers_without_new_weights() -> None:
    config = {**config_of("funnel"), "block_repeats": [5, 7]}
    assert counted(config) == counted(config_of("funnel"))


@pytest.mark.parametrize("model_type", ["longformer", "xmod", "luke", "lilt"])
def test_positions_start_behind_the_padding_tokens(model_type: str) -> None:
    assert read(config_of(model_type)).context_length == 128


def test_published_counts() -> None:
    """Of studio-ousia/luke-base: the entities are the largest module."""
    counts = count_parameters(
        read(
            {"model_type": "luke", "max_position_embeddings": 514, "type_vocab_size": 1},
            Task.MASKED_LM,
        )
    )
    assert (counts.total, counts.base) == (314_446_971, 274_502_144)
    assert counts.largest_layer == 128_000_000


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        ("squeezebert", {"embedding_size": 32}, "embedding_size: must be the hidden_size"),
        ("squeezebert", {"q_groups": 3}, "q_groups: 64 is not divisible"),
        ("convbert", {"num_groups": 3}, "not divisible by num_groups"),
        ("xmod", {"languages": []}, "languages"),
        ("xlnet", {"n_head": 5}, "not divisible"),
    ],
)
def test_impossible_shapes(model_type: str, changed: dict[str, object], message: str) -> None:
    model = {**config_of(model_type), **changed}
    with pytest.raises(ConfigError, match=message):
        read(model)


def test_nothing_reads_the_boxes_that_lilts_last_layer_hands_on() -> None:
    """Its scores are read; what is made of the values has no gradient (torch 2.13, ``grad is None``)."""
    tape = record_model(read(config_of("lilt"), TOKENS), TapeOptions(seq_len=16))
    *_, last = [each for each in tape.segments if each.is_layer]
    unused = {
        (each.index, one.module) for each in tape.segments for one in each.parameters if one.unused
    }
    assert unused == {
        (last.index, module)
        for module in (
            "attention.self.layout_value", "attention.layout_output.dense",
            "attention.layout_output.LayerNorm", "layout_intermediate.dense",
            "layout_output.dense", "layout_output.LayerNorm",
        )
    }  # fmt: skip
