"""Configurations that Python functions return, read without running them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.errors import ConfigError, ExitCode
from memplan.sources.files import read_mapping
from memplan.sources.python_files.reading import made_by
from memplan.sources.setup_file import SetupFile, read_setup_file

REGISTRY = '''
from typing import cast

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

from . import model_registry

LENGTH = 2 * 4096


def _base(flavor: str, *, batch: int = 1) -> Trainer.Config:
    """Shared by all."""

    def messages(sample):
        return [sample["question"]]

    model_spec = model_registry(flavor)
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=batch * LENGTH, max_context_length=LENGTH, steps=1000,
            disable_cuda_graphs=True,
        ),
        dataloader=Loader.Config(processor=Chat.Config(messages_fn=messages), filters=(lambda each: each,)),
        activation_checkpoint=FullAC.Config(),
    )


def llama3_8b() -> Trainer.Config:
    return _base("8B")


def llama3_70b() -> Trainer.Config:
    config = _base("70B", batch=2)
    assert config.model_spec is not None
    compiled = config.compile.enable and "model" in config.compile.components
    config.parallelism.tensor_parallel_degree = 8
    config.activation_checkpoint = None
    config.model_spec = model_registry("70B", converters=[Float8LinearConverter.Config(model_compile_enabled=compiled)])
    return config


def llama3_opaque() -> Trainer.Config:
    config = _base("8B")
    config.training.dtype = cast(str, pick())
    return config
'''


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    path = tmp_path / "llama3" / "config_registry.py"
    path.parent.mkdir()
    path.write_text(REGISTRY, encoding="utf-8")
    return path


def read(path: Path, name: str) -> SetupFile:
    return read_setup_file(f"{path}:{name}")


def as_toml(tmp_path: Path, text: str) -> SetupFile:
    path = tmp_path / "same.toml"
    path.write_text(text, encoding="utf-8")
    return read_setup_file(path)


def test_a_function_says_what_the_same_toml_says(registry: Path, tmp_path: Path) -> None:
    found = read(registry, "llama3_8b")
    same = as_toml(
        tmp_path,
        "model = {name = 'llama3', flavor = '8B'}\n"
        "training = {local_batch_size = 1, seq_len = 8192}\n"
        "activation_checkpoint.mode = 'full'\n",
    )
    assert (found.setup, found.model) == (same.setup, same.model)
    assert found.model == "llama-3.1-8b"


def test_what_is_set_behind_the_call_counts(registry: Path, tmp_path: Path) -> None:
    found = read(registry, "llama3_70b")
    same = as_toml(
        tmp_path,
        "model = {name = 'llama3', flavor = '70B', converters = ['float8']}\n"
        "training = {local_batch_size = 2, seq_len = 8192}\n"
        "quantize.linear.float8.recipe_name = 'rowwise'\n"
        "parallelism.tensor_parallel_degree = 8\n"
        "activation_checkpoint.mode = 'none'\n",
    )
    assert (found.setup, found.model) == (same.setup, same.model)


def test_what_would_have_to_be_run_is_refused_where_it_is_needed_alone(registry: Path) -> None:
    """``dataloader`` holds a function too."""
    with pytest.raises(
        ConfigError, match=r"training[.]dtype: '\$\{cast.*is filled in when the job runs"
    ):
        read(registry, "llama3_opaque")


def test_a_misspelt_function_is_named_where_none_says_what_it_returns(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text("def small():\n    return Trainer.Config()\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has no function smal[.] Did you mean 'small'"):
        read_setup_file(Path(f"{path}:smal"))


def test_the_function_has_to_be_named(registry: Path, run: Any) -> None:
    words = "name the function whose configuration is to be read, as .*:llama3_8b .llama3_8b, llama3_70b, llama3_opaque"
    with pytest.raises(ConfigError, match=words):
        read_mapping(registry)
    with pytest.raises(ConfigError, match=r"has no function llama_8b[.] Did you mean 'llama3_8b'"):
        read(registry, "llama_8b")
    done = run("estimate", "--setup", f"{registry}:llama3_9b", "--gpu", "h100")
    assert done.exit_code == ExitCode.INPUT
    done = run("estimate", "--setup", f"{registry}:llama3_8b", "--gpu", "h100")
    assert done.exit_code == ExitCode.OK
    assert "llama-3.1-8b" in done.stdout


def test_a_script_names_module_and_function(registry: Path, tmp_path: Path) -> None:
    """``run_train.sh``, whose flags go before what the function says."""
    folder = tmp_path / "torchtitan" / "models"
    folder.mkdir(parents=True)
    registry.parent.rename(folder / "llama3")
    script = tmp_path / "run_train.sh"
    script.write_text(
        'MODULE=${MODULE:-"llama3"}\nCONFIG=${CONFIG:-"llama3_8b"}\n'
        "torchrun --nproc_per_node=4 --rdzv_backend c10d --local-ranks-filter 0 --role rank --tee 3 "
        '-m torchtitan.train --module ${MODULE} --config ${CONFIG} --training.max_context_length 4096 "$@"\n',
        encoding="utf-8",
    )
    found = read_setup_file(script)
    assert found.model == "llama-3.1-8b"
    assert (found.setup.num_gpus, found.setup.micro_batch_size, found.setup.seq_len) == (4, 2, 4096)
    script.write_text(
        "torchrun -m torchtitan.train --module qwen3 --config qwen3_8b", encoding="utf-8"
    )
    with pytest.raises(
        ConfigError,
        match=r"runs torchtitan/models/qwen3/config_registry[.]py, which is neither beside it",
    ):
        read_setup_file(script)
    (tmp_path / "debug.toml").write_text(
        "[model]\nname = 'llama3'\nflavor = '8B'\n", encoding="utf-8"
    )
    script.write_text(
        "torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train --job.config_file debug.toml --training.seq_len 512",
        encoding="utf-8",
    )
    setup = read_setup_file(script).setup
    assert (setup.num_gpus, setup.seq_len) == (16, 512)


def test_a_flavor_that_makes_a_named_model_small_is_not_that_model() -> None:
    """Of TOML files too: ``flavor = 'debugmodel'`` overrules the named checkpoint's sizes."""
    from memplan.sources.stacks import read_stack

    values = {
        "model": {"name": "a", "flavor": "full"},
        "hf_transformers": {"model": "Qwen/Qwen3-4B"},
    }
    assert read_stack(values, "torchtitan", source="a.toml").model == "Qwen/Qwen3-4B"
    values["model"]["flavor"] = "debugmodel"
    assert read_stack(values, "torchtitan", source="a.toml").model is None


def of(body: str, name: str = "f") -> dict[str, object]:
    return made_by(body, name, label="a.py")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def f(): return A.Config(-2, x=7 // 2 * 3 - 1, y=1 / 4)", {"_args_": [-2], "x": 8, "y": 0.25}),
        ("def f():\n x = 2 if 3 > 2 else 1\n if x == 2:\n  return A.Config(a=1)\n return A.Config(a=2)", {"a": 1}),
        ("def f():\n a: A = A.Config()\n a.b.c = {'d': [1, (2,)]}\n return a", {"b": {"c": {"d": [1, [2]]}}}),
        ("def g(x, *, y=2): return A.Config(x=x, y=y)\ndef f(): return g(1)", {"x": 1, "y": 2}),
        ("def f():\n a = A.Config(b=[i for i in x])\n return a", {"b": "${[i for i in x]}"}),
        ("def f():\n if not isinstance(x, A):\n  raise ValueError\n return A.Config(b=not True)", {"b": False}),
        ("from a.b import m as n\ndef f(): return A.Config(b=n(1))", {"b": {"_call_": "m", "_from_": "a.b", "_args_": [1]}}),
        ("def f():\n print('hello')\n return A.Config(b='x' + 'y', c=2 ** 9)", {"b": "${'x' + 'y'}", "c": "${2 ** 9}"}),
    ],
)  # fmt: skip
def test_what_is_followed(body: str, expected: dict[str, object]) -> None:
    assert of(body) == {"_class_": "A.Config", **expected}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def f(): return f()", "line 1: calls itself"),
        ("A = B\nB = A\ndef f(): return X.Config(a=A)", "calls itself"),
        ("def f():\n a = A.Config()\n change(a)\n return a", r"line 3: change\(a\) may change the result"),
        ("def f():\n a = [1]\n a.append(2)\n return A.Config(a=a)", r"line 3: a.append\(2\) may change"),
        ("def f():\n for a in b:\n  pass\n return A.Config()", "line 2: for a in b: is not followed"),
        ("def f():\n if a():\n  return A.Config()", r"line 2: whether a\(\) is not known"),
        ("def f():\n a = b()\n a.c = 1\n a['d'] = 2", r"line 4: a\['d'\] = 2 is not followed"),
        ("def f():\n b.c = 1\n return A.Config()", "line 2: b is made elsewhere"),
        ("def f():\n pass", "line 1: f returns nothing"),
        ("def f(x): return A.Config()", "line 1: f takes x, and is called otherwise"),
        ("@a\ndef f(): return A.Config()", "f is called or declared in a way that is not followed"),
        ("def f(): return A.Config(a=1 // 0)", "line 1: 1 // 0 has no result"),
        ("def f(): return other(1)", "f returns what other makes, which is not in this file"),
        ("def f(): return 3", "f returns no Config"),
        ("def f(: pass", "is not Python: .* at line 1"),
        ("x = '\0'", "is not Python"),
        ("def f():\n a = A.Config()\n a.b = a\n return a", "more deeply than is followed"),
        ("def f():\n a = [0]\n" + " a = [a, a]\n" * 40 + " return A.Config(a=a)", "more deeply"),
        ("def f(): return A.Config(a=" + "-" * 5000 + "1)", "nested|not Python"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused_in_one_line(body: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        of(body)
    assert "\n" not in str(caught.value)


def test_numbers_do_not_grow_without_end() -> None:
    body = "def f():\n a = 10\n" + " a = a * a\n" * 60 + " return A.Config(a=a)"
    assert str(of(body)["a"]).startswith("${a * a")


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    cut=st.integers(0, len(REGISTRY)),
    width=st.integers(0, 40),
    word=st.sampled_from(["", "(", "None", "x", "\n", "*a", "= "]),
)
def test_a_spoilt_file_is_read_or_refused(cut: int, width: int, word: str) -> None:
    try:
        made_by(REGISTRY[:cut] + word + REGISTRY[cut + width :], "llama3_70b", label="a.py")
    except ConfigError as error:
        assert "\n" not in str(error)
