"""The server for agents, asked by the protocol's own client, and what hostile calls come to."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.cli.agent_tools import MAX_ANSWER, TOOLS, WITHHELD, agent_tools, call
from memplan.cli.with_typer.app import load_command

# To import it takes a second, which a process that runs none of these tests need not spend.
pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")


def test_each_tool_has_its_command_s_options() -> None:
    found = {each.name: each for each in agent_tools()}
    assert tuple(found) == TOOLS
    for name, tool in found.items():
        names = {each.name for each in load_command(name).params}
        assert set(tool.schema["properties"]) == names - WITHHELD
        json.dumps(tool.schema)
    assert (
        found["estimate"]
        .schema["properties"]["seq_len"]["description"]
        .startswith("Tokens of a sequence")
    )


def test_over_the_wire(tmp_path: Path) -> None:
    """A process of its own, asked over its standard streams."""
    import anyio
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters

    (tmp_path / "mine.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "architectures": ["GPT2LMHeadModel"]})
    )
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "memplan", "mcp", "--root", str(tmp_path)]
    )

    async def ask() -> list[Any]:
        async with Client(server) as client:
            listed = await client.list_tools()
            asked = [
                ("estimate", {"model": "gpt2", "gpu": "h100", "batch_size": 2, "gpus": 1}),
                ("estimate", {"model": "mine.json", "gpu": ["t4", "h100"]}),
                ("gpus", {"name": "h100", "format": "json"}),
                ("estimate", {"model": "gpt3000"}),
            ]
            return [listed, *[await client.call_tool(name, words) for name, words in asked]]

    listed, one, mine, card, wrong = anyio.run(ask)
    assert [each.name for each in listed.tools] == list(TOOLS)
    assert one.content[0].text.startswith(
        "$ memplan estimate --gpu=h100 --batch-size=2 --gpus=1 -- gpt2\nH100-80  fits"
    )
    assert not mine.is_error
    assert (
        json.loads(card.content[0].text.partition("\n")[2])["rows"][0]["gpu_id"] == "h100-sxm-80gb"
    )
    assert wrong.is_error
    assert "no built-in model" in wrong.content[0].text or "gpt3000" in wrong.content[0].text


def test_the_answer_is_the_terminal_s(run: Any, tmp_path: Path) -> None:
    found = call("estimate", {"model": "gpt2", "gpu": "h100"}, tmp_path)
    assert found.text.partition("\n")[2] == run("estimate", "gpt2", "--gpu", "h100").stdout
    checked = call(
        "estimate", {"model": "gpt2", "gpu": "t4", "batch_size": 64, "check": "all"}, tmp_path
    )
    assert not checked.is_error


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file beside the root, and a link to it inside."""
    root = tmp_path / "root"
    root.mkdir()
    secret = tmp_path / "secret.json"
    secret.write_text('{"model_type": "gpt2", "word": "treasure"}')
    (root / "link.json").symlink_to(secret)
    (root / "axolotl.yaml").write_text(
        f"base_model: {secret}\nsequence_len: 512\nadapter: lora\nlora_r: 8\n"
    )
    return root


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("estimate", {"model": "../secret.json"}),
        ("estimate", {"model": "link.json"}),
        ("estimate", {"model": "/etc/passwd"}),
        ("estimate", {"model": "~/.ssh/id_rsa"}),
        ("estimate", {"model": "gpt2", "setup": "../secret.json"}),
        ("estimate", {"model": "gpt2", "gpu": "h100,../card.yaml"}),
        (
            "estimate",
            {"model": "gpt2", "preset": "axolotl", "training_args": "axolotl.yaml", "x": 1},
        ),
        ("estimate", {"setup": "axolotl.yaml"}),
        ("estimate", {"model": "gpt2", "output": "here.json"}),
        ("estimate", {"model": "gpt2", "token": "hf_x"}),
        ("estimate", {"model": {"a": 1}}),
        ("estimate", {"model": "gpt2", "time": "yes"}),
        ("estimate", {"model": "gpt2", "seq_len": [1, 2]}),
        ("estimate", {"model": "x" * 10_000_000}),
        ("estimate", {"model": "a\x00b"}),
        ("estimate", {"model": "--version"}),
        ("verify", {"model": "gpt2"}),
        ("; rm -rf /", {}),
        ("estimate", {"--help": True}),
        ("plan", {"model": "gpt2", "emit": "deepspeed", "format": "x"}),
    ],
)
def test_what_is_refused(outside: Path, name: str, arguments: dict[str, Any]) -> None:
    found = call(name, arguments, outside)
    assert found.is_error
    assert len(found.text) < 2000
    assert found.text.strip().count("\n") == 0
    assert "treasure" not in found.text
    assert "Traceback" not in found.text


@settings(max_examples=40)
@given(
    name=st.sampled_from([*TOOLS, "verify", "mcp"]),
    arguments=st.dictionaries(
        st.sampled_from(["model", "name", "gpu", "batch_size", "format", "other"])
        | st.text(max_size=4),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=6)
        | st.lists(st.integers(), max_size=2),
        max_size=3,
    ),
)
def test_odd_calls_are_answered_or_refused(name: str, arguments: dict[str, Any]) -> None:
    found = call(name, arguments, ROOT)
    assert "a bug" not in found.text
    assert len(found.text) <= MAX_ANSWER + 100


ROOT = Path(__file__).parent
