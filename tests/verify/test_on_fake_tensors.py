"""The real code of torch and transformers on fake tensors, followed storage by storage, beside the estimate."""

from importlib.util import find_spec
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.estimator.measured import Figure, figures_of
from memplan.sources.about_models.found_config import local_config
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.verify.run import Run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),  # of other people's code
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None,
        reason="torch and transformers are not installed: make verify",
    ),
]
BAR = 0.001
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1408, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
MPNET: dict[str, Any] = {
    "model_type": "mpnet", "architectures": ["MPNetForMaskedLM"], "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip
SMALL = {"llama": LLAMA, "mpnet": MPNET}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, bf16, checkpointing": (
        "gpt2",
        {"seq_len": 256, "precision": "bf16", "checkpointing": "full"},
    ),
    "t5-small": ("t5-small", {"seq_len": 256, "target_seq_len": 128}),
    "Llama, fp32, eager, some layers, two micro-batches": (
        "llama",
        {
            "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach", "seq_len": 256,
            "checkpointing": "0-1", "gradient_accumulation_steps": 2,
        },
    ),
    "Llama, FSDP2": ("llama", {"num_gpus": 8, "engine": "fsdp", "seq_len": 256}),
}  # fmt: skip


def followed(name: str, values: dict[str, Any]) -> list[Figure]:
    from memplan.verify.on_torch.measuring import follow

    config = SMALL[name] if name in SMALL else dict(local_config(name)[1])
    model = load_model(config)
    setup = TrainingSetup(kernel_scratch=False, **values).resolve(model.context_length)
    gpu = load_gpu("a100-80gb")
    run = Run(config=config, name=name, model=model, setup=setup, num_steps=2)
    return figures_of(estimate(model, setup, gpu), follow(run, gpu))


def test_a_class_that_marks_no_layers_is_not_sharded() -> None:
    with pytest.raises(SetupError, match="MPNetForMaskedLM marks no layers"):
        followed("mpnet", {"num_gpus": 8, "engine": "fsdp", "seq_len": 64})


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_lora() -> None:
    lora = {"lora": {"rank": 8, "targets": "all-linear", "dtype": "bf16"}}
    for each in followed("llama", {"adapter": lora, "seq_len": 256}):
        assert abs(each.error) <= BAR, each


def asked_of_torch() -> tuple[object, ...]:
    import torch

    functions = torch.cuda.is_available, torch.tensor, torch.cuda.Stream
    return *functions, torch.nn.functional.scaled_dot_product_attention, torch.cuda.is_available()


@pytest.mark.parametrize("case", CASES)
def test_within_the_bar(case: str) -> None:
    before = asked_of_torch()
    figures = followed(*CASES[case])
    assert {each.part for each in figures} >= {"forward", "backward", "step", "held"}
    for each in figures:
        assert abs(each.error) <= BAR, each
    assert figures[0].what == "parameters"
    assert figures[0].error == 0
    assert asked_of_torch() == before, "torch is left as it was"
