"""The command line and Python are two faces of one table: every option, the same answer in both."""

import csv
import doctest
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import memplan
from memplan.cli.with_typer.app import load_command
from memplan.errors import MemplanError
from memplan.options.python import ESTIMATE, PLAN, SWEEP, Keyword
from memplan.options.typed import EstimateOptions, PlanOptions, SweepOptions
from memplan.training.choices import Offload, ZeroStage
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision

pytestmark = pytest.mark.long

Run = Callable[..., Any]

DEEPSPEED = {"gpus": 8, "engine": "deepspeed", "zero": 2, "offload": "none", "gpu": "h100"}
LLAMA = {"model": "llama-3.2-1b"}
LORA = {"lora": 8}
EVALUATION = {"eval_batch_size": 4}
MIXTURE = {
    "model": "olmoe-1b-7b",
    "gpus": 8,
    "engine": "fsdp",
    "offload": "none",
    "expert_parallel": 2,
}
PIPELINE = {
    "model": "llama-3.2-1b",
    "gpus": 4,
    "engine": "fsdp",
    "pipeline_parallel": 4,
    "gradient_accumulation": 4,
}

FROM_PYTHON: dict[str, tuple[object, dict[str, Any]]] = {
    "gpus": (8, {"engine": "deepspeed", "zero": 2, "offload": "none"}),
    "nodes": (2, DEEPSPEED),
    "gpu": ("a100", {}),
    "gpu_memory": ("46GiB", {"gpu": None}),
    "cpu_memory": ("16GiB", DEEPSPEED | {"offload": "cpu", "zero": 1}),
    "engine": (Engine.FSDP, {"gpus": 8, "offload": "none"}),
    "zero": (ZeroStage.PARAMETERS, {"gpus": 8, "engine": "deepspeed", "offload": "none"}),
    "offload": (Offload.CPU, {"gpus": 8, "engine": "deepspeed", "zero": 2}),
    "offload_param": ("none", {"gpus": 8, "engine": "deepspeed", "zero": 3, "offload": "cpu"}),
    "fsdp_strategy": ("shard_grad_op", {"gpus": 8, "engine": "fsdp", "offload": "none"}),
    "precision": (Precision.FP32, DEEPSPEED),
    "batch_size": (4, {}),
    "gradient_accumulation": (4, {}),
    "seq_len": ("512", {}),
    "target_seq_len": (256, {"model": "t5-small"}),
    "images_per_sample": (2, {"model": "qwen2-vl-2b"}),
    "image_size": (448, {"model": "qwen2-vl-2b"}),
    "image_width": (512, {"model": "sd3.5-medium", "image_size": 1024}),
    "num_frames": (17, {"model": "wan2.1-t2v-1.3b"}),
    "audio_seconds": (10, {"model": "wav2vec2-base-960h"}),
    "tensor_parallel": (2, LLAMA | {"gpus": 2, "engine": "fsdp"}),
    "sequence_parallel": (True, LLAMA | {"gpus": 2, "engine": "fsdp", "tensor_parallel": 2}),
    "loss_parallel": (True, LLAMA | {"gpus": 2, "engine": "fsdp", "tensor_parallel": 2}),
    "context_parallel": (2, LLAMA | {"gpus": 2, "engine": "fsdp"}),
    "context_parallel_kind": ("ring", LLAMA | {"gpus": 2, "engine": "fsdp", "context_parallel": 2}),
    "expert_parallel": (2, {"model": "olmoe-1b-7b", "gpus": 8, "engine": "fsdp"}),
    "expert_imbalance": (1.5, MIXTURE),
    "pipeline_parallel": (4, PIPELINE),
    "pipeline_schedule": ("gpipe", PIPELINE),
    "virtual_stages": (4, PIPELINE | {"pipeline_schedule": "interleaved-1f1b"}),
    "layers_per_stage": ([3, 5, 5, 3], PIPELINE),
    "fp8": ("torchao-rowwise", LLAMA | {"compile": "layer"}),
    "optimizer": (Optimizer.SGD, {}),
    "optimizer_in_backward": (True, {}),
    "checkpointing": (0.5, {}),
    "offload_activations": ("save-on-cpu", {}),
    "offload_activations_ratio": (
        0.5, PIPELINE | {"offload_activations": "chunks", "engine": "megatron"},
    ),
    "kernels": ("liger", LLAMA),
    "attention": ("eager", {}),
    "norm": ("fused", LLAMA),
    "mlp": ("fused", LLAMA),
    "mlp_tiles": (4, LLAMA | {"precision": "bf16-master", "gpus": 8, "engine": "deepspeed", "zero": 3, "offload": "none"}),
    "rotary": ("liger", LLAMA),
    "scan": ("package", {"model": "mamba-130m"}),
    "loss": ("fused_linear", LLAMA),
    "loss_tiles": (8, LLAMA | DEEPSPEED | {"zero": 1, "loss": "tiled"}),
    "packing": ("padding_free", LLAMA | {"attention": "flash"}),
    "dropout": (0.0, {}),
    "freeze": (["embeddings", "layers.0-3"], {}),
    "quantize": ("nf4", LLAMA | LORA),
    "outputs_held": (True, {}),
    "gradients_held": (True, {"engine": "ddp"}),
    "upcast_outputs": (True, {}),
    "compile": ("layer", LLAMA),
    "allocator": ("expandable", {}),
    "kernel_scratch": (False, {}),
    "lora": (16, {}),
    "lora_targets": (["c_attn", "c_proj"], LORA),
    "lora_dropout": (0.1, LORA),
    "lora_dtype": ("bf16", LORA),
    "dora": (True, LLAMA | LORA),
    "adapter": ("ADAPTER", LLAMA),
    "optim_args": ({"momentum": 0.9}, {"optimizer": "sgd"}),
    "job": ("dpo:reference=precomputed", LLAMA),
    "ema": ("fp32", {}),
    "eval_batch_size": (8, {}),
    "eval_batches_kept": (2, EVALUATION),
    "eval_accumulation_steps": (2, EVALUATION),
    "eval_seq_len": (2048, EVALUATION),
    "lengths": ("512:60%,1024:40%", {}),
    "engine_option": ({"reduce_bucket_size": 100_000_000}, DEEPSPEED),
    "global_batch_size": (64, DEEPSPEED),
    "num_layers": (6, {}),
    "setup": ("configs/setups/one-gpu-finetune.yaml", {}),
    "preset": ("nanogpt", {}),
    "training_args": ("configs/files/sft-arguments.yaml", {}),
    "deepspeed_config": ("configs/files/zero3-offload.json", {"gpus": 8}),
    "accelerate_config": ("configs/files/accelerate-fsdp2.yaml", {"gpus": 8}),
    "task": ("sequence-classification", {}),
    "family": ("llama", {"model": "CONFIG"}),
    "num_labels": (7, {"task": "sequence-classification"}),
    "revision": (None, {}),
    "token": ("secret", {}),
    "allow_guess": (True, {"model": "CONFIG"}),
    "allow_unknown_keys": (True, {"model": "MISSPELT"}),
    "time": (True, {}),
    "tokens": ("1B", {}),
    "examples": (52_002, {}),
    "epochs": (3.0, {"tokens": "1B"}),
    "price": (2.5, {"tokens": "1B"}),
    "mfu": (0.4, {}),
    "save_every": ("10m", {"tokens": "1B"}),
    "failures_per_gpu_day": (0.01, {"tokens": "1B"}),
    "eval_every": (100, {"tokens": "1B", "eval_examples": 1000}),
    "eval_examples": (1000, {"tokens": "1B", "eval_every": 100}),
    "loader": (0.5, {}),
    "network": (400, DEEPSPEED | {"gpus": 16, "nodes": 2}),
    "oversubscription": (4.0, DEEPSPEED | {"gpus": 512}),
    "in_network_reduction": (True, DEEPSPEED | {"gpus": 512}),
    "host": (2.0, {}),
    "calibration": ("CALIBRATION", {"time": True}),
}  # fmt: skip
"""For each option a value as Python has it, and what it needs beside it."""

TERMINAL_ONLY = {
    "format", "output", "emit", "legend", "lifetimes", "reserved", "per_rank", "pivot", "check",
    "fail_on", "baseline", "tolerance", "unmatched", "deepspeed", "deepspeed_formula", "params",
    "largest_layer", "additional_buffer_factor", "annotate", "report", "chart", "assumptions",
    "measured_step", "save_calibration", "dask", "resume",
}  # fmt: skip
"""How an answer is written, checks at exit, and DeepSpeed's own tables: values in Python."""


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed."""
    found = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        value = getattr(value, "value", value)
        if value is None:
            continue
        if name == "kernel_scratch":
            found.append("--no-kernel-scratch")
        elif value is True:
            found.append(flag)
        elif name in ("optim_args", "engine_option") and isinstance(value, dict):
            found += [flag, ",".join(f"{key}={each}" for key, each in value.items())]
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found += [flag, text]
    return found


@pytest.fixture
def places(tmp_path: Path, checkout: Path) -> dict[str, str]:
    """What words in the table stand for."""
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        "intermediate_size": 128, "num_key_value_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    files = {
        "ADAPTER": adapter,
        "CALIBRATION": {"gpu": "h100", "compute": 1.5, "host": 2.0},
        "CONFIG": {"model_type": "llamalike", **config},
        "MISSPELT": {"model_type": "llama", "num_hidden_layer": 3, **config},
    }
    found = {}
    for name, values in files.items():
        path = tmp_path / f"{name.lower()}.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        found[name] = str(path)
    for kind in ("setups", "files"):
        for each in (checkout / "configs" / kind).iterdir():
            found[f"configs/{kind}/{each.name}"] = str(each)
    return found


@pytest.mark.parametrize("name", FROM_PYTHON)
def test_every_option_has_one_answer(run: Run, places: dict[str, str], name: str) -> None:
    value, beside = FROM_PYTHON[name]
    options: dict[str, Any] = {"gpu": "h100"} | beside | {name: value}
    options = {
        key: places.get(each, each) if isinstance(each, str) else each
        for key, each in options.items()
    }
    model = options.pop("model", "gpt2")
    outcome = run("estimate", model, *flags(options), "--format", "json")
    assert outcome.exit_code == 0, outcome.stderr
    rows = json.loads(outcome.stdout)["rows"]
    answer = memplan.estimate(model, **options)
    row = json.loads(json.dumps(answer.to_dict()))
    matching = [each for each in rows if row.items() <= each.items()]
    assert matching, [
        {key: (each.get(key), row[key]) for key in row if row[key] != each.get(key)}
        for each in rows
    ]
    if name not in ("offload", "offload_param"):  # where places for the rest are compared
        assert len(rows) == 1
    typed = memplan.estimate(model, **{**options, name: _text(options[name])})
    assert typed.to_dict() == answer.to_dict()
    if name not in NO_DIFFERENCE:
        plain = {key: each for key, each in options.items() if key != name}
        assert different(model, plain, row)


NO_DIFFERENCE = {
    "revision", "token", "price", "epochs", "allow_guess", "allow_unknown_keys", "family",
    "eval_accumulation_steps", "network", "oversubscription", "in_network_reduction",
}  # fmt: skip
"""Options without which the sample's row is the same, or there is none."""


def different(model: str, options: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether the answer without an option is another."""
    try:
        return json.loads(json.dumps(memplan.estimate(model, **options).to_dict())) != row
    except MemplanError:
        return True


def _text(value: Any) -> Any:
    """The value as text, where it is no flag."""
    value = getattr(value, "value", value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, dict):
        return ",".join(f"{key}={each}" for key, each in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(
    ("command", "face", "typed"),
    [
        ("estimate", ESTIMATE, EstimateOptions),
        ("sweep", SWEEP, SweepOptions),
        ("plan", PLAN, PlanOptions),
    ],
)
def test_the_faces_have_the_same_options_and_defaults(
    command: str, face: dict[str, Keyword], typed: type
) -> None:
    options = {
        param.opts[0].lstrip("-").replace("-", "_"): param
        for param in load_command(command).params
        if param.param_type_name == "option"
    }
    of_hints = {"allow"} if command == "estimate" else set()
    assert face.keys() == options.keys() - TERMINAL_ONLY - of_hints
    own = {"gpu", "setup"} if command == "estimate" else set()
    assert set(typed.__annotations__) | own == face.keys()
    for name, keyword in face.items():
        assert keyword.default == options[name].default, name


def test_no_option_is_without_a_sample() -> None:
    assert FROM_PYTHON.keys() == ESTIMATE.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sise": 4}, "there is no option 'batch_sise'. Did you mean 'batch_size'?"),
        ({"micro_batch_size": 4}, "there is no option 'micro_batch_size'. It is called 'batch_size'."),
        ({"max_length": 4}, "there is no option 'max_length'. It is called 'seq_len'."),
        ({"batch_size": "four"}, "batch_size: 'four' is not a whole number"),
        ({"batch_size": [1, 2]}, "batch_size: one value is taken, got [1, 2]: memplan.sweep takes several"),
        ({"batch_size": 0}, "batch_size: "),
        ({"lora_dropout": 0.1}, "lora_dropout: means nothing without lora: add that, or leave it out"),
        ({"engine": "fsdp3"}, "engine: 'fsdp3' is not one of"),
        ({"zero": "1-3"}, "zero: '1-3' names 3 stages, and one setup takes one"),
        ({"gpu": ["t4", "h100"]}, "gpu: names several, and one estimate is of one"),
        ({"batch_size": "max"}, "batch_size max: is the largest that fits one card: name it"),
        ({"cpu_memory": "much"}, "cpu_memory: "),
        ({"price": 2.5}, "price: says nothing without the length of a run: add tokens or examples"),
        ({"sequence_parallel": "yes"}, "sequence_parallel: must be True or False, got 'yes'"),
    ],
)  # fmt: skip
def test_errors_speak_of_keywords(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MemplanError, match=re.escape(message)) as caught:
        memplan.estimate("gpt2", **options)
    assert "--" not in str(caught.value)


def test_a_sweep_is_the_command_lines(run: Run) -> None:
    outcome = run(
        "sweep", "gpt2", "--gpus", "1,8", "--engine", "deepspeed", "--zero", "1-3", "--batch-size",
        "1..4", "--precision", "bf16-master", "--gpu", "t4,h100", "--tokens", "1B", "--format", "json",
    )  # fmt: skip
    found = memplan.sweep(
        "gpt2", gpus=[1, 8], engine=Engine.DEEPSPEED, zero=range(1, 4), batch_size="1..4",
        precision="bf16-master", gpu=["t4", "h100"], tokens="1B",
    )  # fmt: skip
    assert json.loads(outcome.stdout) == json.loads(json.dumps(found.to_dict()))


def test_a_plan_is_the_command_lines(run: Run) -> None:
    words = "--gpus 1,2 --gpu h100 --checkpointing none,full --precision bf16-master --limit 3 --mlp-tiles 2"
    outcome = run("plan", "llama-3.2-1b", *words.split(), "--format", "json")
    found = memplan.plan(
        "llama-3.2-1b", gpus=range(1, 3), gpu="h100", checkpointing=["none", "full"],
        precision=Precision.BF16_MASTER, limit=3, mlp_tiles=2,
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads(outcome.stdout) == json.loads(json.dumps(found.to_dict()))


def test_catalogs_are_the_command_lines(run: Run) -> None:
    rows = json.loads(run("gpus", "--format", "json").stdout)["rows"]
    assert rows == json.loads(json.dumps([each.to_dict() for each in memplan.gpus()]))
    listed = csv.DictReader(io.StringIO(run("models", "--format", "csv").stdout))
    assert [each["name"] for each in listed] == [each.name for each in memplan.models()]


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    answer = memplan.estimate("gpt2", gpu="46GB", batch_size=64)
    assert answer.hints() is not None
    assert answer.explain().to_dict()["rows"]
    assert memplan.sweep("gpt2", batch_size=[1, 2], gpu="46GB").rows()
    assert capsys.readouterr() == ("", "")
    assert any("46GB" in note for note in answer.notes)


def test_hints_are_the_command_lines(run: Run) -> None:
    words = ["llama-3.1-8b", "--gpu", "4090", "--allow", "lora,qlora", "--seq-len", "512"]
    document = json.loads(run("estimate", *words, "--format", "json").stdout)
    answer = memplan.estimate("llama-3.1-8b", gpu="4090", seq_len=512)
    for allow in ("lora,qlora", ["lora", "qlora"]):
        hints = answer.hints(allow=allow)
        assert [each.to_dict() for each in hints] == document["hints"]
    assert "lora" in hints[0].text
    assert "--" not in hints[0].text


def test_the_largest_is_what_hints_say(run: Run) -> None:
    outcome = run("estimate", "gpt2", "--gpu", "t4", "--format", "json")
    (row,) = json.loads(outcome.stdout)["rows"]
    assert memplan.estimate("gpt2", gpu="t4").largest_batch == row["largest_micro_batch"]
    assert memplan.estimate("gpt2").largest_batch is None


def test_types_of_keywords_can_be_read() -> None:
    import typing

    for each in (EstimateOptions, SweepOptions, PlanOptions):
        names = {"Adapter": Any, "GpuSpec": Any, "Job": Any, "Lengths": Any, "TrainingSetup": Any}
        hints = get_type_hints(each, localns=names)
        assert all(typing.get_origin(hint) or get_args(hint) or hint for hint in hints.values())


def test_the_page_runs_and_names_all_that_is_public(checkout: Path) -> None:
    page = checkout / "docs" / "python.md"
    text = page.read_text(encoding="utf-8").replace("```", "")
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    test = parser.get_doctest(text, {}, "python.md", str(page), 0)
    assert len(test.examples) > 20
    said: list[str] = []
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
    for name in memplan.__all__:
        assert f"`{name}`" in text or name == "__version__", name
