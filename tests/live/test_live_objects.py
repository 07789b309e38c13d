"""A Trainer, a model and an optimizer in memory are read as the setup that the options say; the run goes on as it would have."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.estimator import estimate
from memplan.live.checking import world_size
from memplan.sources.gpus import load_gpu
from memplan.training.adapters import Lora
from memplan.training.setup import TrainingSetup

NEEDED = ("torch", "transformers", "accelerate", "peft")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),  # of other people's code
    pytest.mark.skipif(
        any(find_spec(name) is None for name in NEEDED),
        reason=f"{', '.join(NEEDED)} are not all installed: make verify",
    ),
]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
TOKENS = 32
EXAMPLES = [
    {"input_ids": [3] * TOKENS, "labels": [3] * TOKENS, "attention_mask": [1] * TOKENS}
    for _ in range(16)
]


def llama(dtype: str = "float32") -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, dtype))


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def trainer(model: Any, folder: Path, **given: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    callbacks = given.pop("callbacks", [])
    usual: dict[str, Any] = {
        "output_dir": str(folder), "report_to": [], "use_cpu": True, "max_steps": 4, "save_strategy": "no",
        "logging_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(**usual | given)
    return Trainer(model=model, args=arguments, train_dataset=EXAMPLES, callbacks=callbacks)


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {"precision": "fp32"}),
    "checkpointing": ({"gradient_checkpointing": True}, {"precision": "fp32", "checkpointing": "full"}),
    "accumulation": ({"gradient_accumulation_steps": 4}, {"precision": "fp32", "gradient_accumulation_steps": 4}),
    "adafactor": ({"optim": "adafactor"}, {"precision": "fp32", "optimizer": "adafactor"}),
    "autocast": ({"bf16": True}, {"precision": "bf16-amp"}),
    "batch": ({"per_device_train_batch_size": 5}, {"precision": "fp32", "micro_batch_size": 5}),
}  # fmt: skip
"""Arguments of a Trainer, and the fields of a setup that say the same."""


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_is_what_its_options_say(case: str, tmp_path: Path) -> None:
    given, fields = CASES[case]
    found = memplan.check(trainer(llama(), tmp_path, **given), gpu="h100")
    said = {
        "optimizer": "adamw-fused",
        "micro_batch_size": 2,
        "seq_len": TOKENS,
        "attention": "sdpa",
        **fields,
    }
    expected = estimate(memplan.load_model(CONFIG), TrainingSetup(**said), load_gpu("h100"))
    assert found.estimate.peak_bytes == expected.peak_bytes
    assert found.estimate.required_bytes == expected.required_bytes
    assert found.estimate.num_params == sum(each.numel() for each in llama().parameters())
    assert found.remarks == (
        f"sequences of {TOKENS} tokens: the longest of the data set's first examples",
    )


def test_an_adapter_and_half_weights_are_read(tmp_path: Path) -> None:
    found = memplan.check(
        trainer(with_lora(llama("bfloat16")), tmp_path, bf16=True), gpu="h100"
    ).estimate
    assert found.setup.adapter == Lora(rank=8, alpha=8, targets=("q_proj", "v_proj"))
    assert found.setup.precision is not None
    assert found.setup.precision.value == "bf16-autocast"
    assert 0 < found.trainable_params < found.num_params


def test_a_loop_of_one_s_own() -> None:
    import torch

    model = llama()
    batch = {"input_ids": torch.zeros(4, 16, dtype=torch.long)}
    for optimizer, name in (
        (torch.optim.AdamW(model.parameters()), "adamw-foreach"),
        (torch.optim.AdamW(model.parameters(), foreach=False), "adamw-loop"),
        (torch.optim.SGD(model.parameters(), momentum=0.9), "sgd-momentum"),
    ):
        setup = memplan.check(model, optimizer, batch=batch, gpu="h100").estimate.setup
        assert (setup.optimizer.value, setup.micro_batch_size, setup.seq_len) == (name, 4, 16)
        assert setup.precision is not None
        assert setup.precision.value == "fp32"
    compiled = memplan.check(
        torch.compile(model), optimizer, batch=batch, precision="bf16-amp", gpu="h100"
    )
    assert not compiled.remarks
    with pytest.raises(memplan.MemplanError, match="give the batch that the loop hands"):
        memplan.check(model, optimizer)
    with pytest.raises(memplan.MemplanError, match="ASGD is none that is known here"):
        memplan.check(model, torch.optim.ASGD(model.parameters()), batch=batch)
    with pytest.raises(memplan.MemplanError, match="Linear has no config of transformers'"):
        memplan.check(torch.nn.Linear(2, 2), seq_len=8)


def losses(made: Any) -> list[float]:
    made.train()
    return [each["loss"] for each in made.state.log_history if "loss" in each]


def test_the_callback_says_it_and_changes_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    callback = memplan.MemplanCallback(gpu="h100", say=lines.append)
    watched = losses(trainer(llama(), tmp_path, callbacks=[callback]))
    assert watched == losses(trainer(llama(), tmp_path))
    assert len(watched) == 4
    (said,) = lines  # nothing is measured without a card
    assert said.startswith("memplan: H100-80: fits, needs ")
    assert callback.checked is not None
    assert callback.checked.verdict == "fits"


def test_a_run_that_would_die_ends_before_its_first_step(tmp_path: Path) -> None:
    callback = memplan.MemplanCallback("raise", gpu="100MiB", say=lambda _: None)
    made = trainer(llama(), tmp_path, callbacks=[callback])
    with pytest.raises(memplan.MemplanError, match=r"does not fit, needs .* of 0\.1 GiB"):
        made.train()
    assert made.state.global_step == 0


def test_fix_checkpoints_where_that_is_enough(tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 64}
    without = memplan.check(
        trainer(llama(), tmp_path, **given), gpu="80GiB"
    ).estimate.total_bytes.low
    with_it = memplan.check(
        trainer(llama(), tmp_path, gradient_checkpointing=True, **given), gpu="80GiB"
    ).estimate.total_bytes.low
    assert with_it < without
    lines: list[str] = []
    callback = memplan.MemplanCallback(
        "fix", gpu=f"{(with_it + without) // 2 // 1024}KiB", say=lines.append
    )
    made = trainer(llama(), tmp_path, callbacks=[callback], **given)
    made.train()
    assert made.model.is_gradient_checkpointing
    assert callback.checked is not None
    assert not callback.checked.is_out_of_memory


def test_ranks_as_launchers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert world_size() == 8
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert world_size() == 1
