"""Every way from hidden states to a loss, in bytes per logit."""

from dataclasses import replace

import pytest

from memplan.dtypes import DType
from memplan.estimator.recording import tape_options
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.losses.tasks import liger_chunk_rows
from memplan.graph.model import record_model
from memplan.memory.step import StepWalk
from memplan.sources.models import load_model
from memplan.training.choices_of_kernels.kernels import Kernels, LossKernel
from memplan.training.compilation import Compilation
from memplan.training.objectives import Objective
from memplan.training.setup import TrainingSetup
from tests.plain_step import PlainStep, plain_step

TOKENS, VOCAB, HIDDEN = 2048, 128_000, 512
LOGITS = TOKENS * VOCAB


def step(loss: LossKernel, **options: object) -> PlainStep:
    """A tiny model under a large vocabulary, in bf16."""
    model = load_model(
        {
            "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": HIDDEN,
            "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": VOCAB,
            "tie_word_embeddings": False,
        }
    )  # fmt: skip
    base = TapeOptions(seq_len=TOKENS, compute=DType.BF16, kernels=Kernels(loss=loss))
    return plain_step(StepWalk(record_model(model, replace(base, **options))).run())


def per_logit(num_bytes: int) -> float:
    return num_bytes / LOGITS


def test_eager() -> None:
    """10 bytes in forward, 4 after it, 12 in backward (fp32 log-softmax and two gradients)."""
    found = step(LossKernel.EAGER)
    assert per_logit(found.forward_peak.loss_bytes) == pytest.approx(10, abs=2e-4)
    assert per_logit(found.after_forward.loss_bytes) == pytest.approx(4, abs=2e-4)
    assert per_logit(found.backward_peak.loss_bytes) == pytest.approx(12, abs=5e-6)


def test_shifted_copies_the_logits() -> None:
    """The cut and the uncut logits are both fp32 while the log-softmax is made."""
    found = step(LossKernel.SHIFTED)
    assert per_logit(found.forward_peak.loss_bytes) == pytest.approx(12, abs=0.01)
    assert per_logit(found.after_forward.loss_bytes) == pytest.approx(4, abs=0.005)


def test_shifted_apart_also_holds_the_logits_themselves() -> None:
    """The class's own bf16 logits stand beside what its loss function makes of them."""
    found = step(LossKernel.SHIFTED_APART)
    assert per_logit(found.forward_peak.loss_bytes) == pytest.approx(14, abs=0.01)
    assert per_logit(found.after_forward.loss_bytes) == pytest.approx(4, abs=0.005)


def test_foak_writes_over_the_shifted_copy() -> None:
    """bf16, fp32 and its cut; where the class rebinds its logits the first are gone by then."""
    apart, rebound = step(LossKernel.FOAK), step(LossKernel.FOAK_REBOUND)
    assert per_logit(apart.forward_peak.loss_bytes) == pytest.approx(10, abs=0.005)
    assert per_logit(rebound.forward_peak.loss_bytes) == pytest.approx(8, abs=0.005)
    for found in (apart, rebound):
        assert per_logit(found.after_forward.loss_bytes) == pytest.approx(4, abs=0.005)


def test_shifted_uncast_stays_in_bf16() -> None:
    """Logits, their cut and its log-softmax; then the log-softmax and two gradients."""
    found = step(LossKernel.SHIFTED_UNCAST)
    assert per_logit(found.forward_peak.loss_bytes) == pytest.approx(6, abs=0.005)
    assert per_logit(found.after_forward.loss_bytes) == pytest.approx(2, abs=0.003)
    assert per_logit(found.backward_peak.loss_bytes) == pytest.approx(6, abs=0.008)


def test_fused_linear_makes_the_gradients_in_forward() -> None:
    """Liger keeps the gradients of the hidden states and of the matrix, and no logits."""
    found = step(LossKernel.FUSED_LINEAR)
    kept = 2 * TOKENS * HIDDEN + 2 * VOCAB * HIDDEN
    final_norm = TOKENS * (6 * HIDDEN + 4)
    assert found.after_forward.loss_bytes == pytest.approx(kept, abs=final_norm)
    rows = liger_chunk_rows(TOKENS, vocab_size=VOCAB, hidden_size=HIDDEN)
    assert found.forward_peak.loss_bytes == pytest.approx(kept + 2 * rows * VOCAB, abs=final_norm)


def test_fused_linear_with_a_frozen_head_makes_no_gradient_for_it() -> None:
    from memplan.training.freezing import FrozenParts

    found = step(LossKernel.FUSED_LINEAR, freeze=FrozenParts(head=True))
    assert found.after_forward.loss_bytes < 2 * VOCAB * HIDDEN


def test_unsloths_pieces_share_their_budget_with_the_heads_gradients() -> None:
    """Two of them, and the hidden states' one, are what cannot be cut (``get_chunk_size``); a frozen head has none.

    Equation: one piece where ``16 bytes x rows x V`` are within what is left of 4 GiB, else a multiple of four.
    """
    from memplan.training.freezing import FrozenParts

    head, hidden = 2 * VOCAB * HIDDEN, 2 * TOKENS * HIDDEN
    assert (4 << 30) - hidden - 2 * head < 16 * LOGITS < (4 << 30) - hidden
    for frozen, made, pieces in ((False, head, 4), (True, 0, 1)):
        found = step(LossKernel.UNSLOTH_FUSED, freeze=FrozenParts(head=frozen))
        cut = 16 * LOGITS // pieces
        assert found.forward_peak.loss_bytes == pytest.approx(cut + 2 * made + hidden)


def test_chunked_never_makes_all_logits() -> None:
    """torchtitan's pieces: an eighth of the logits at 12 bytes, and 2 for the 16-bit ones."""
    found = step(LossKernel.CHUNKED)
    assert per_logit(found.forward_peak.loss_bytes) == pytest.approx(14 / 8, abs=0.6)
    assert per_logit(found.backward_peak.loss_bytes) < 1


def test_softmax_in_place() -> None:
    """Megatron's: fp32 logits are the softmax, and later the gradient."""
    found = step(LossKernel.PARALLEL_FUSED)
    assert per_logit(found.after_forward.loss_bytes) == pytest.approx(4, abs=5e-6)
    assert per_logit(found.backward_peak.total_bytes) < 8


def test_what_a_training_loop_adds() -> None:
    """accelerate's fp32 copy of the logits is 4 bytes each, for as long as the outputs are held."""
    plain = step(LossKernel.EAGER)
    held = step(LossKernel.EAGER, outputs_held=True)
    both = step(LossKernel.EAGER, outputs_held=True, upcast_outputs=True)
    for name, extra in (("after_forward", 2), ("backward_peak", 2)):
        before = getattr(plain, name).total_bytes
        assert per_logit(getattr(held, name).total_bytes - before) == pytest.approx(extra)
        assert per_logit(getattr(both, name).total_bytes - before) == pytest.approx(4)


@pytest.mark.parametrize(
    ("model_type", "task", "vocabulary"),
    [
        ("gpt2", "causal-lm", 50257), ("electra", "masked-lm", 30522), ("bart", "seq2seq-lm", 50265),
        ("t5", "seq2seq-lm", 32128), ("fsmt", "seq2seq-lm", 42024), ("whisper", "seq2seq-lm", 51865),
        ("speecht5", "seq2seq-lm", 81), ("prophetnet", "seq2seq-lm", 30522),
    ],
)  # fmt: skip
def test_a_loop_adds_it_whatever_takes_the_loss(
    model_type: str, task: str, vocabulary: int
) -> None:
    """Logits of an encoder or of two stacks are copied, and held, as a decoder's."""
    model = load_model({"model_type": model_type}, task)
    setup = TrainingSetup(
        precision="bf16-amp",  # type: ignore[arg-type]
        micro_batch_size=2, seq_len=16, outputs_held=True, upcast_outputs=True,
    ).resolve(model.context_length)  # fmt: skip
    held = record_model(model, tape_options(setup, None)).outputs
    assert held is not None
    assert held.num_bytes == allocated_bytes(2 * 16 * vocabulary, DType.FP32)


@pytest.mark.parametrize(
    ("loss", "after", "backward"),
    [
        # bytes a logit: kept after forward, and at the highest point of backward
        pytest.param(LossKernel.LIGER, 4, 6, id="Liger's: fp32, then the 16-bit gradient"),
        pytest.param(LossKernel.FLASH_ATTENTION, 2, 2, id="flash-attention's: in place"),
        pytest.param(LossKernel.FOAK, 4, 8, id="FOAK's: gradients of the cut and of the whole"),
        pytest.param(LossKernel.FOAK_UNCAST, 2, 4, id="the same in 16 bits"),
        pytest.param(LossKernel.UNSLOTH, 2, 4, id="Unsloth's: a new gradient"),
        pytest.param(LossKernel.TORCHTUNE, 4, 5.25, id="torchtune's: one piece's gradients"),
    ],
)
def test_one_kernel(loss: LossKernel, after: float, backward: float) -> None:
    found = step(loss)
    assert per_logit(found.after_forward.loss_bytes) == pytest.approx(after, abs=0.005)
    assert per_logit(found.backward_peak.loss_bytes) == pytest.approx(backward, abs=0.6)


def test_torchtunes_pieces_are_compiled_with_the_layers() -> None:
    """The logits stay in 16 bits, with two numbers a row; each piece's gradient comes, and its logits go.

    So torch 2.13's CUDA build allocates for ``compile_loss``: 225.7 MiB after the forward pass of 2048
    tokens and 32000 words, 481.6 MiB without torch.compile.
    """
    found = step(LossKernel.TORCHTUNE, compile=Compilation.LAYER)
    assert per_logit(found.after_forward.loss_bytes) == pytest.approx(2, abs=2e-4)
    assert per_logit(found.backward_peak.loss_bytes) < 2.6, "5.25 without"


@pytest.mark.parametrize("loss", [LossKernel.CUT, LossKernel.TRL])
def test_no_logits_at_all(loss: LossKernel) -> None:
    """Both gradients are made in backward: TRL gathers them in fp32, and has one tile of logits."""
    found = step(loss)
    assert per_logit(found.after_forward.loss_bytes) < 0.05
    matrix = VOCAB * HIDDEN
    gathered = 6 * (matrix + TOKENS * HIDDEN) + 2 * TOKENS * 32_768
    most = gathered if loss is LossKernel.TRL else 2 * matrix
    assert found.backward_peak.loss_bytes <= 1.1 * most + 10 * TOKENS * HIDDEN


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "hidden_size", "rows"),
    [(8192, 128_256, 4096, 256), (16_384, 32_000, 4096, 2048), (4, 50_000, 64, 1)],
)
def test_liger_chunk_rows(tokens: int, vocab_size: int, hidden_size: int, rows: int) -> None:
    assert liger_chunk_rows(tokens, vocab_size=vocab_size, hidden_size=hidden_size) == rows


@pytest.mark.parametrize(
    ("objective", "kept", "rows"),
    [
        pytest.param(Objective.LAST_LOGITS, None, 1, id="transformers' generate: the next token's"),
        pytest.param(Objective.LOGITS, None, 48, id="all tokens'"),
        pytest.param(Objective.LOGITS, 16, 17, id="TRL's logits_to_keep: one more, to be cut off"),
        pytest.param(Objective.LOGITS, 48, 48, id="no prompt"),
    ],
)
def test_of_how_many_tokens_there_are_logits(
    objective: Objective, kept: int | None, rows: int
) -> None:
    model = load_model({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 500})
    options = TapeOptions(
        seq_len=48, batch_size=3, objective=objective, kept_logits=kept, without_gradients=True
    )
    last = [each for each in record_model(model, options).segments if each.operations][-1]
    assert last.operations[-1].outputs[0].numel == 3 * rows * 500


@pytest.mark.parametrize(
    ("autocast", "dtype"), [(None, DType.BF16), (DType.BF16, DType.FP32)], ids=["as is", "autocast"]
)
def test_entropies_are_computed_as_autocast_has_log_softmax(
    autocast: DType | None, dtype: DType
) -> None:
    """128 rows at a time (TRL, trainer/utils.py, ``entropy_from_logits``); autocast's list has ``log_softmax`` in fp32."""
    model = load_model({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 512})
    options = TapeOptions(
        seq_len=257, batch_size=2, objective=Objective.POLICY_GRADIENT, compute=DType.BF16,
        autocast=autocast,
    )  # fmt: skip
    tape = record_model(model, options)
    found = (each for segment in tape.segments for each in segment.operations)
    entropy = next(each for each in found if each.kind is OperationKind.ENTROPY)
    assert entropy.forward_scratch == (128 * 512 * dtype.num_bytes,) * 3
    assert [(each.numel, each.dtype) for each in entropy.outputs] == [(2 * 256, dtype)]
