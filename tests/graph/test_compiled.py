"""What a compiled region keeps, writes and hands back."""

import sys
from dataclasses import replace
from itertools import product
from subprocess import run
from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.estimator import estimate
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.model import record_model
from memplan.memory.passes import StepPasses
from memplan.memory.step import StepWalk
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.compilation import Compilation
from memplan.training.freezing import FrozenParts
from memplan.training.setup import TrainingSetup

TOKENS, HIDDEN, KEYS, WIDTH, HEADS = 1024, 512, 256, 1536, 8
LLAMA = load_model(
    {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "num_hidden_layers": 4,
        "vocab_size": 4096,
    }
)  # fmt: skip
GPT2 = load_model({"model_type": "gpt2", "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 4})
T5 = load_model(
    {"model_type": "t5", "d_model": 256, "d_ff": 1536, "num_layers": 2, "vocab_size": 4096},
    "seq2seq-lm",
)
RECTIFIED_IN_PLACE = load_model(
    {
        "model_type": "vitmatte", "hidden_size": 64,
        "backbone_config": {
            "model_type": "vitdet", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        },
    }
)  # fmt: skip
OPTIONS = TapeOptions(
    seq_len=TOKENS, weights=DType.BF16, compute=DType.BF16, compile=Compilation.LAYER
)


def walked(model: Any, options: TapeOptions = OPTIONS) -> tuple[Tape, StepPasses]:
    tape = record_model(model, options)
    return tape, StepWalk(tape).run()


def layer_of(tape: Tape) -> Segment:
    return next(each for each in tape.segments if each.is_layer)


def kept_bytes(segment: Segment) -> int:
    kept = {storage for each in segment.operations for storage in each.saved}
    return sum(storage.num_bytes for storage in kept)


def small(num_rows: int, count: int) -> int:
    return num_rows * 4 * count


def test_a_llama_layer_keeps_what_its_products_read() -> None:
    """Both norms' outputs, queries, attention's output, its product, the product of the gate; the rest
    is computed again but for two statistics a token and one for each head."""
    layer = layer_of(record_model(LLAMA, OPTIONS))
    expected = 2 * TOKENS * (6 * HIDDEN + 2 * KEYS + 3 * WIDTH) + 4 * TOKENS * HEADS
    assert kept_bytes(layer) - expected == small(TOKENS, 2) + 2 * 512  # a seed and an offset


def test_a_gpt2_layer_keeps_its_masks_as_bytes() -> None:
    layer = layer_of(record_model(GPT2, OPTIONS))
    expected = 2 * TOKENS * 16 * HIDDEN + 2 * TOKENS * HIDDEN + 4 * TOKENS * HEADS
    assert kept_bytes(layer) - expected == small(TOKENS, 4) + 2 * 512


def test_autocasts_copies_of_weights_are_kept_by_the_layer() -> None:
    amp = replace(OPTIONS, weights=DType.FP32, compute=DType.FP32, autocast=DType.BF16)
    half, mixed = (layer_of(record_model(LLAMA, each)) for each in (OPTIONS, amp))
    products = [each for each in half.parameters if len(each.shape) == 2]
    copies = sum(2 * each.numel for each in products)
    # The residual stream is in fp32 there; the sum in the middle is made again of a 16-bit product.
    assert kept_bytes(mixed) - kept_bytes(half) == copies + 2 * TOKENS * HIDDEN
    assert not any(
        tensor.storage.weight_cast for each in mixed.operations for tensor in each.outputs
    )


def test_a_frozen_products_input_is_computed_again() -> None:
    frozen = replace(OPTIONS, freeze=FrozenParts.parse("layers.0-3"))
    trained, still = (layer_of(record_model(LLAMA, each)) for each in (OPTIONS, frozen))
    # What each product reads: both norms' outputs and the gated product.
    spared = 2 * TOKENS * (2 * HIDDEN + WIDTH)
    assert kept_bytes(trained) - kept_bytes(still) == spared


def test_what_is_rectified_is_kept_as_a_sign() -> None:
    """T5's feed-forward network: a byte for where it is zero, a byte for dropout, and the result."""
    layer = layer_of(record_model(T5, OPTIONS))
    sizes = [
        storage.num_bytes for storage in {each for op in layer.operations for each in op.saved}
    ]
    assert sizes.count(TOKENS * 1536) == 2
    assert sizes.count(2 * TOKENS * 1536) == 1


def test_inside_a_kernel_nothing_is_written() -> None:
    layer = layer_of(record_model(LLAMA, OPTIONS))
    written = [t for each in layer.operations for t in each.outputs if t.storage.num_bytes]
    assert {tensor.dtype for tensor in written if tensor.numel > TOKENS * HEADS} == {DType.BF16}


@pytest.mark.parametrize("scope", [Compilation.LAYER, Compilation.MODEL])
@pytest.mark.parametrize(
    "model", [LLAMA, GPT2, T5, RECTIFIED_IN_PLACE], ids=["llama", "gpt2", "t5", "vitmatte"]
)
def test_everything_comes_and_goes_once(model: Any, scope: Compilation) -> None:
    """Between steps nothing is left of the model, and each trained weight has had its gradient."""
    for share in (0.0, 1.0):
        options = replace(OPTIONS, compile=scope, checkpointed_layers=share)
        tape, passes = walked(model, options)
        _, eager = walked(model, replace(options, compile=Compilation.NONE))
        assert passes.after_backward.total_bytes == eager.after_backward.total_bytes
        found = {interval.parameter for each in passes.backward for interval in each.intervals}
        trained = {
            each for segment in tape.segments for each in segment.parameters if not each.unused
        }
        assert found - {None} == trained


def test_gradients_come_when_their_region_returns() -> None:
    _, passes = walked(LLAMA)
    layer = next(each for each in passes.backward if each.segment.is_layer)
    assert sum(len(interval.events) for interval in layer.intervals[1:]) == 0


def test_the_head_keeps_its_logits_in_16_bits() -> None:
    tape = record_model(LLAMA, replace(OPTIONS, compile=Compilation.MODEL))
    kept = {each for op in tape.segments[-1].operations for each in op.saved}
    assert 2 * TOKENS * 4096 in [each.num_bytes for each in kept]
    assert max(each.num_bytes for each in kept) == 2 * TOKENS * 4096


def test_a_tied_tables_product_waits_for_the_embedding() -> None:
    tied = load_model({**dict(LLAMA_CONFIG), "tie_word_embeddings": True})
    options = replace(OPTIONS, compile=Compilation.MODEL)
    _, passes = walked(tied, options)
    head, embed = passes.backward[0], passes.backward[-1]
    table = embed.intervals[0].parameter
    assert all(interval.parameter is not table for interval in head.intervals)


LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 4096,
}  # fmt: skip

ENGINES: dict[str, dict[str, Any]] = {
    "one GPU": {}, "ddp": {"num_gpus": 2, "engine": "ddp"},
    "fsdp": {"num_gpus": 2, "engine": "fsdp"}, "fsdp1": {"num_gpus": 2, "engine": "fsdp1"},
    **{f"zero-{stage}": {"num_gpus": 2, "engine": "deepspeed", "zero_stage": stage}
       for stage in range(4)},
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_sums_and_the_played_run_agree(engine: dict[str, Any]) -> None:
    for model, scope, steps in product((LLAMA, T5), ("layer", "model"), (1, 2)):
        setup = TrainingSetup(
            seq_len=128, compile=scope, gradient_accumulation_steps=steps, **engine
        )
        answer = estimate(model, setup)
        assert answer.run.peaks.requested_bytes == answer.worst_bytes


def test_one_graph_returns_all_gradients_beside_those_that_are_there() -> None:
    """With accumulation a second set of gradients waits for the whole backward pass."""
    setup = TrainingSetup(seq_len=64, precision="bf16", gradient_accumulation_steps=2)  # type: ignore[arg-type]
    layer, model = (
        estimate(LLAMA, replace(setup, compile=scope))
        for scope in (Compilation.LAYER, Compilation.MODEL)
    )
    gradients = 2 * layer.num_params
    assert model.peak_bytes - layer.peak_bytes > 0.5 * gradients


@pytest.mark.parametrize("recipe", ["none", "torchao-tensorwise", "torchao-rowwise"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_one_graph_keeps_no_more_than_its_layers_by_themselves(
    recipe: str, checkpointing: str
) -> None:
    """The cuts through every layer are one through the whole, and the least is looked for; codes of 8 bits are made again
    like anything else."""
    setup = TrainingSetup(seq_len=512, precision="bf16", fp8=recipe, checkpointing=checkpointing)  # type: ignore[arg-type]
    layers, whole = (
        estimate(LLAMA, replace(setup, compile=scope), load_gpu("h100"))
        for scope in (Compilation.LAYER, Compilation.MODEL)
    )
    assert whole.activations_bytes <= layers.activations_bytes
    assert whole.phases["forward"].peak_bytes <= layers.phases["forward"].peak_bytes


def test_only_what_is_compiled_pays_for_it() -> None:
    code = (
        "import sys, memplan; memplan.estimate('gpt2', memplan.TrainingSetup());"
        "assert 'memplan.graph.compiled' not in sys.modules"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0
