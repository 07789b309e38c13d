"""Messages of a model that ranks share, counted and weighed: b*s*h of 16 bits each.

Korthikanti et al., arXiv:2205.05198, section 4.2.2: a tensor-parallel layer has two all-reduces in each pass, which sequence
parallelism cuts into as many reduce-scatters and all-gathers. Plans that split each matrix by itself, as transformers'
and DTensor's do, reduce the gradient of each column-wise matrix's input: queries, keys, values, gate and up.
"""

from collections import Counter

import pytest

import memplan
from memplan.compute.rates import rates_of
from memplan.compute.roofline import segment_work
from memplan.estimator.job import Job
from memplan.training.splitting.exchange import ExchangeKind, Group

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
STREAM = 128 * 256 * 2
"""One sequence of 128 tokens, 256 wide, in 16 bits [bytes]."""
LOGITS = 128 * 1024 * 2
GATHER, SCATTER, REDUCE = (
    ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER, ExchangeKind.ALL_REDUCE,
)  # fmt: skip
Sent = dict[tuple[ExchangeKind, int], int]


def sent(**settings: object) -> dict[str, tuple[Sent, Sent, Sent]]:
    """Of each segment that sends, how often what: forward, backward, and where it is run again."""
    model, gpu = memplan.load_model(CONFIG), memplan.load_gpu("h100")
    setup = memplan.TrainingSetup(**{"num_gpus": 8, "seq_len": 128, **settings})  # type: ignore[arg-type]
    tape = Job.of(model, setup, gpu).given.tape
    shared = Group.SHARED if "context_parallel" in settings else Group.SPLIT
    found = {}
    for segment, work in zip(tape.segments, segment_work(tape, model, rates_of(gpu)), strict=True):
        passes = (work.forward, work.backward, work.again)
        assert all(each.group is shared for one in passes for each in one.messages)
        forward, backward, again = (
            dict(Counter((each.kind, each.num_bytes) for each in one.messages)) for one in passes
        )
        if forward or backward or again:
            found[segment.name] = forward, backward, again
    return found


def test_split_layers_reduce_twice_forward_and_for_each_matrix_backward() -> None:
    assert sent(engine="fsdp", tensor_parallel=2) == {
        "embed": ({(REDUCE, STREAM): 1}, {}, {}),
        "decoder.layers": ({(REDUCE, STREAM): 2}, {(REDUCE, STREAM): 5}, {}),
        "head": ({(GATHER, LOGITS): 1}, {(REDUCE, STREAM): 1}, {}),
    }


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    both = {(GATHER, STREAM): 2, (SCATTER, STREAM): 2}
    assert sent(engine="fsdp", tensor_parallel=2, sequence_parallel=True) == {
        "embed": ({(SCATTER, STREAM): 1}, {(GATHER, STREAM): 1}, {}),
        "decoder.layers": (both, both, {}),
        "head": ({(GATHER, STREAM): 1, (GATHER, LOGITS): 1}, {(SCATTER, STREAM): 1}, {}),
    }


def test_a_layer_that_runs_again_sends_all_but_its_end_again() -> None:
    found = sent(
        engine="fsdp", tensor_parallel=2, sequence_parallel=True, loss_parallel=True,
        checkpointing="full",
    )  # fmt: skip
    assert found["decoder.layers"][2] == {(GATHER, STREAM): 2, (SCATTER, STREAM): 1}
    assert found["head"] == ({(GATHER, STREAM): 1}, {(SCATTER, STREAM): 1}, {})


def test_megatron_gathers_inputs_again_for_the_weights_gradients() -> None:
    """And its loss over words that are spread: the largest score, the word's own, the sum, each fp32 a token."""
    found = sent(engine="megatron", tensor_parallel=2, sequence_parallel=True)
    assert found["decoder.layers"][1] == {(GATHER, STREAM): 4, (SCATTER, STREAM): 2}
    assert found["head"][0] == {(GATHER, STREAM): 1, (REDUCE, 128 * 4): 3}


def test_a_ring_gathers_keys_and_values_and_reduces_their_gradients_in_fp32() -> None:
    forward, backward, _ = sent(engine="fsdp", context_parallel=2)["decoder.layers"]
    assert forward == {(GATHER, 2 * STREAM): 1}
    assert backward == {(GATHER, 2 * STREAM + 2 * 2 * STREAM): 1}


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp"])
def test_whole_models_send_nothing_of_their_own(engine: str) -> None:
    assert not sent(engine=engine)
