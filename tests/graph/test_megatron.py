"""Megatron's layers on the tape: the formulas in print come out of what its modules keep."""

from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator.recording import record_and_walk, tape_options
from memplan.formulas.activations import TextbookRecomputation, parallel_layer_bytes
from memplan.graph.core.segments import Operation
from memplan.memory.passes import ForwardPass
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.exchange import ExchangeKind

GPT = {
    "model_type": "gpt2", "n_embd": 4096, "n_head": 32, "n_layer": 4, "n_positions": 2048,
    "vocab_size": 51200, "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 5632, "num_hidden_layers": 4, "vocab_size": 32000,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def layers(config: dict[str, Any], **fields: Any) -> list[ForwardPass]:
    degree = fields.get("tensor_parallel", 1)
    options = {"transformer_impl": "local", **fields.pop("engine_options", {})}
    setup = TrainingSetup(engine="megatron", num_gpus=degree, engine_options=options, **fields)  # type: ignore[arg-type]
    model = load_model(config, "causal-lm")
    _, passes = record_and_walk(model, tape_options(setup.resolve(model.context_length), None))
    return [each for each in passes.forward if each.segment.is_layer]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("degree", "sequence"), [(1, False), (2, False), (8, False), (2, True), (8, True)]
)
def test_published_formulas(checkpointing: str, degree: int, sequence: bool) -> None:
    """``sbh(10 + 24/t + 5as/(ht))`` and its kin (arXiv:2205.05198, table 2), and two norms' statistics."""
    (found,) = layers(
        GPT, tensor_parallel=degree, sequence_parallel=sequence, checkpointing=checkpointing,
        seq_len=2048, micro_batch_size=2,
    )  # fmt: skip
    formula = parallel_layer_bytes(
        4096, num_heads=32, seq_len=2048, batch_size=2, tensor_parallel=degree,
        sequence_parallel=sequence, recomputation=TextbookRecomputation(checkpointing),
    )  # fmt: skip
    statistics = 0 if checkpointing == "full" else 16 * 4096 // (degree if sequence else 1)
    assert found.later_bytes == formula + statistics


def test_chunks_and_first_layers_are_recomputed() -> None:
    """Uniform: an input for every chunk; block: the first layers alone."""
    full = {"recompute_granularity": "full", "recompute_num_layers": 2}
    (chunks,) = layers(LLAMA, seq_len=512, engine_options=full)
    assert (chunks.segment.repeat, chunks.later_bytes) == (2, 2 * 512 * 2048)
    block = {**full, "recompute_method": "block"}
    first, rest = layers(LLAMA, seq_len=512, engine_options=block)
    assert (first.segment.repeat, first.segment.checkpointed) == (2, True)
    assert (rest.segment.repeat, rest.segment.checkpointed) == (2, False)


def test_transformer_engine_keeps_no_scores() -> None:
    """Normed inputs and shares of them, turned queries and keys, values of their own."""
    (found,) = layers(
        LLAMA, tensor_parallel=4, sequence_parallel=True, seq_len=1024,
        engine_options={"transformer_impl": "transformer_engine"},
    )  # fmt: skip
    tokens, share, heads, width = 1024, 256, 4, 1408
    kept = 4 * 2 * share * 2048  # two residuals, two normed ones
    kept += 2 * tokens * (2 * heads + 2) * 128  # queries, output, key, value
    kept += 2 * tokens * 3 * width  # gate and up, their product
    kept += 4 * tokens * heads + 2 * 4 * share + 1024  # log-sums, roots, random state
    assert found.later_bytes == kept


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SetupError, match="key/value heads is 4, which 8 ranks cannot share evenly"):
        layers(LLAMA, tensor_parallel=8)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "decoders"),
        (
            {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
            "a norm before attention",
        ),
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, "more than heads"),
    ],
)
def test_models_without_modules_are_refused(config: dict[str, Any], why: str) -> None:
    setup = TrainingSetup(engine="megatron")  # type: ignore[arg-type]
    model = load_model(config)
    with pytest.raises(SetupError, match=f"megatron is not modelled for .*{why}"):
        record_and_walk(model, tape_options(setup.resolve(model.context_length), None))


GATHER, SCATTER, REDUCE = (
    ExchangeKind.ALL_GATHER,
    ExchangeKind.REDUCE_SCATTER,
    ExchangeKind.ALL_REDUCE,
)
HALF = 0.5
"""Backward a collective runs beside one of a product's two."""


def sent(config: dict[str, Any], way: str, **options: Any) -> list[tuple[ExchangeKind, float]]:
    """What products of a layer send, each ``2sbh`` bytes, and beside how much of their computing."""
    (found,) = layers(config, tensor_parallel=2, seq_len=1024, **options)
    sends = [each for one in found.segment.operations for each in getattr(one.sends, way)]
    hidden = config.get("hidden_size", config.get("n_embd"))
    size = 2 * 1024 * hidden
    assert {each.num_bytes for each in sends} == {size}
    # Of what is shared along the sequence the whole lies there for a moment; partial sums are added up in their place.
    scattered = [one for one in found.segment.operations if SCATTER in _kinds(one)]
    assert all(size in one.forward_scratch for one in scattered)
    reduced = [one for one in found.segment.operations if REDUCE in _kinds(one)]
    assert not any(one.forward_scratch for one in reduced)
    return [(each.kind, each.beside) for each in sends]


def _kinds(operation: Operation) -> list[ExchangeKind]:
    return [each.kind for each in operation.sends.forward]


def test_what_products_of_a_layer_send() -> None:
    """Two all-reduces each way; shared along the sequence each is an all-gather and a reduce-scatter, and backward gathers
    the inputs of the columns' products again (arXiv:2205.05198, section 4.2.2).

    Kwai's fork hides what its products send in the forward pass wholly (``overlap-sp-ag``, ``overlap-sp-rs``); its
    attention's last product is Megatron's own, whose sum is an operation by itself.
    """
    fused = {"engine_options": {"transformer_impl": "transformer_engine"}}
    assert sent(GPT, "forward", **fused) == 2 * [(REDUCE, 0)]
    assert sent(GPT, "backward", **fused) == 2 * [(REDUCE, HALF)]
    forks = {"engine_options": {"transformer_impl": "kwai"}}
    assert sent(LLAMA, "forward", **forks) == [(REDUCE, 0)]
    fused |= {"sequence_parallel": True}
    assert sent(GPT, "forward", **fused) == 2 * [(GATHER, 0), (SCATTER, 0)]
    columns = [(GATHER, HALF), (SCATTER, HALF)]
    assert sent(GPT, "backward", **fused) == 2 * [*columns, (GATHER, 0)]
    hidden = {**fused, "engine_options": {"transformer_impl": "kwai"}}
    assert sent(LLAMA, "forward", **hidden) == [(GATHER, 1), (GATHER, 1), (SCATTER, 1)]
    assert sent(LLAMA, "backward", **hidden) == [*columns, *columns, (GATHER, HALF)]
