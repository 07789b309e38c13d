"""BART's relatives with another attention: counts, and which weights each type adds."""

import pytest

from memplan.errors import ConfigError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.model.spec import Task
from tests.families.reading import counted, read

SMALL = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 96,
    "vocab_size": 1000, "max_position_embeddings": 100, "pad_token_id": 1,
}  # fmt: skip
LED = {
    "model_type": "led", **SMALL, "max_encoder_position_embeddings": 200,
    "max_decoder_position_embeddings": 50,
}  # fmt: skip
BIG = {"model_type": "bigbird_pegasus", **SMALL}
PEGASUS = {"model_type": "pegasus_x", **SMALL, "num_global_tokens": 8}
FSMT = {
    **{key: value for key, value in SMALL.items() if key != "vocab_size"},
    "model_type": "fsmt", "src_vocab_size": 1000, "tgt_vocab_size": 900,
    "tie_word_embeddings": False,
}  # fmt: skip
PROPHET = {
    "model_type": "prophetnet", "hidden_size": 64, "num_encoder_layers": 2,
    "num_decoder_layers": 3, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 2,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 96, "vocab_size": 1000,
    "max_position_embeddings": 100, "ngram": 3, "num_buckets": 8,
}  # fmt: skip


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "total"),
    [
        pytest.param(LED, 310_496, id="led"),
        pytest.param(PEGASUS, 268_256, id="pegasus_x"),
        pytest.param(BIG, 280_288, id="bigbird_pegasus"),
        pytest.param({**BIG, "use_bias": True}, 282_336, id="bigbird_pegasus-biased"),
        pytest.param(FSMT, 397_536, id="fsmt"),
        pytest.param(PROPHET, 285_648, id="prophetnet"),
    ],
)
def test_counts(config: dict[str, object], total: int) -> None:
    assert counted(config) == (total, 64_000)
    assert counted(config, Task.BASE) == (total, 64_000)


@pytest.mark.parametrize(
    ("config", "task", "total"),
    [
        pytest.param(LED, Task.QUESTION_ANSWERING, 310_626, id="led"),
        pytest.param(BIG, Task.QUESTION_ANSWERING, 280_418, id="bigbird-spans"),
        pytest.param(BIG, Task.SEQUENCE_CLASSIFICATION, 284_578, id="bigbird-sequences"),
    ],
)
def test_heads(config: dict[str, object], task: Task, total: int) -> None:
    assert counted(config, task)[0] == total


@pytest.mark.parametrize(
    "config", [LED, PEGASUS, BIG, PROPHET], ids=lambda each: each["model_type"]
)
def test_untied_stacks_have_a_table_each(config: dict[str, object]) -> None:
    """The shared table is still there, and serves nothing."""
    total = counted(config)[0]
    untied = {**config, "tie_word_embeddings": False}
    assert counted(untied)[0] == total + 3 * 64_000
    assert counted(untied, Task.BASE)[0] == total + 2 * 64_000


def test_fsmt_ties_all_three_tables_or_none() -> None:
    config = {**FSMT, "src_vocab_size": 900, "tie_word_embeddings": True}
    counts = count_parameters(read(config))
    assert (counts.total, counts.untied) == (275_936, 275_936 + 900 * 64)
    with pytest.raises(ConfigError, match="cannot tie unequal src_vocab_size"):
        read({**FSMT, "tie_word_embeddings": True})


def test_a_decoder_alone_is_counted_alone() -> None:
    model = read({**PROPHET, "architectures": ["ProphetNetDecoder"]})
    counts = count_parameters(model)
    assert (model.task, counts.total, counts.base) == (Task.OTHER, 212_176, 285_648)


def test_cross_attention_can_be_left_out() -> None:
    without = {**PROPHET, "add_cross_attention": False}
    assert counted(PROPHET)[0] - counted(without)[0] == 3 * (4 * (64 * 64 + 64) + 2 * 64)


def test_context_is_the_encoders() -> None:
    assert read(LED).context_length == 200


def test_prophets_logits_are_copied_with_streams_first_before_their_loss() -> None:
    """``_compute_loss``: ``logits.transpose(0, 1).contiguous()``, behind the first stream's, which is returned by itself.

    (transformers 5.23, modeling_prophetnet.py)
    """
    tape = record_model(read(PROPHET), TapeOptions(batch_size=2, seq_len=8))
    copies = [
        operation.outputs[0].numel
        for operation in tape.segments[-1].operations
        if operation.kind is OperationKind.CLONE
    ]
    _states, first, all_of_them = copies
    assert all_of_them == PROPHET["ngram"] * first
