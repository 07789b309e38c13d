"""What a layer's modules keep, against the sums of arXiv:2205.05198, section 4.1."""

from memplan.dtypes import DType
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.report.explained.layers import module_bytes
from memplan.sources.models import load_model
from memplan.training.choices_of_kernels.kernels import KERNEL_PRESETS, KernelPreset

H, A, S, B = 1024, 16, 512, 2
GPT = {
    "model_type": "gpt2", "n_embd": H, "n_head": A, "n_layer": 2, "n_positions": S, "vocab_size": 51200,
}  # fmt: skip


def modules_of(config: dict[str, object], **options: object) -> list[dict[str, int]]:
    given = {"batch_size": B, "seq_len": S, "target_seq_len": S, **options}
    tape = record_model(load_model(config), TapeOptions(**given))  # type: ignore[arg-type]
    return [dict(module_bytes(each)) for each in tape.segments]


def test_a_textbook_layer() -> None:
    """Attention ``11sbh + 5as²b``, the network ``19sbh``, norms ``4sbh``; a norm's statistics are left out there."""
    sbh = S * B * H
    kernels = KERNEL_PRESETS[KernelPreset.MEGATRON]
    layers = modules_of(GPT, kernels=kernels, compute=DType.BF16)
    found = next(each for each in layers if each)
    assert list(found) == ["norms", "attention", "feed-forward"]
    assert found["attention"] == 11 * sbh + 5 * A * S * S * B
    assert found["feed-forward"] == 19 * sbh
    assert 4 * sbh < found["norms"] < 4.02 * sbh


def test_they_add_up_to_what_the_layer_keeps() -> None:
    from memplan.report.explained.layers import layer_kinds

    for name in ("llama-3.2-1b", "mixtral-8x7b", "t5-small", "deberta-v3-base"):
        model = load_model(name)
        tape = record_model(model, TapeOptions(batch_size=1, seq_len=128, target_seq_len=128))
        kinds = [each for each in layer_kinds(tape, model) if each.modules]
        assert kinds
        for kind in kinds:
            assert 0.99 * kind.kept_bytes < sum(size for _, size in kind.modules) <= kind.kept_bytes


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    assert not any(modules_of(GPT, checkpointed_layers=1.0))
