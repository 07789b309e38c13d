"""Masks that the memory-efficient kernel is given, against PyTorch's CUDA build (torch 2.13.0)."""

import pytest

from memplan.estimator.recording import record, tape_options
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Operation
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

T5 = {
    "model_type": "t5", "d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 8, "num_layers": 1,
    "vocab_size": 1000,
}  # fmt: skip


def attention_of(num_sequences: int, target_seq_len: int) -> list[Operation]:
    """What the decoder's self-attention runs."""
    setup = TrainingSetup(
        micro_batch_size=num_sequences,
        seq_len=64,
        target_seq_len=target_seq_len,
        precision="bf16",  # type: ignore[arg-type]
        attention="sdpa",  # type: ignore[arg-type]
    )
    tape = record(load_model(T5, "seq2seq-lm"), tape_options(setup, load_gpu("a100-80gb")))
    layer = next(each for each in tape.segments if each.name == "decoder.layers")
    kernel = OperationKind.EFFICIENT_ATTENTION
    last = next(place for place, each in enumerate(layer.operations) if each.kind is kernel)
    return layer.operations[: last + 1]


@pytest.mark.parametrize(
    ("num_sequences", "length", "row", "gradient_row"),
    [
        pytest.param(2, 100, 104, 112, id="neither"),
        pytest.param(2, 104, None, 112, id="a gradient in longer rows"),
        pytest.param(1, 100, 104, 112, id="one sequence"),
        pytest.param(2, 112, None, 112, id="both"),
    ],
)
def test_rows_begin_at_a_multiple(
    num_sequences: int, length: int, row: int | None, gradient_row: int
) -> None:
    operations = attention_of(num_sequences, length)
    copies = [each.outputs[0].numel for each in operations if each.kind is OperationKind.PAD]
    assert copies == ([] if row is None else [8 * length * row])
    mask = operations[-1].inputs[3]
    assert mask.numel == num_sequences * 8 * length * gradient_row
