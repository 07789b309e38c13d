"""``memplan mcp``: a server for agents over the Model Context Protocol, on standard input and output."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.cli.taking import NO_VALUES, takes
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from collections.abc import Mapping

INSTRUCTIONS = (
    "Memory, time and cost of training runs, before they are started. estimate judges one setup, plan looks for those that fit, "
    "explain shows the arithmetic. Each answer begins with the command that repeats it."
)


ROOT = Option(
    flag="--root", default=".", metavar="FOLDER", panel="",
    help_text="Files are read below this folder alone.",
)  # fmt: skip
NETWORK = Option(
    flag="--network", kind=bool, default=False, metavar=None, panel="",
    help_text="Allow questions to the Hugging Face hub.",
)  # fmt: skip


@takes(ROOT, NETWORK)
def mcp(values: Values = NO_VALUES) -> None:
    """Serve agents: the commands as tools over the Model Context Protocol."""
    import os

    from memplan import cli
    from memplan.errors import UsageError

    root = values["root"]
    inside = Path(root).resolve()
    if not inside.is_dir():
        msg = f"--root: {root} is no folder"
        raise UsageError(msg)
    if not values["network"]:
        os.environ["HF_HUB_OFFLINE"] = "1"
    cli.owns_process = False  # it has threads, and must not be copied
    serve(inside)


def serve(root: Path) -> None:
    """Answer until the other side goes. Raises ``UsageError`` where the SDK is not installed."""
    from importlib import import_module

    from memplan.errors import UsageError

    try:
        import_module("mcp.server.lowlevel")
    except ImportError:
        msg = 'the Python SDK of the protocol is not installed: pip install "memplan[mcp]"'
        raise UsageError(msg) from None
    import anyio

    anyio.run(_serve, root)


async def _serve(root: Path) -> None:
    from mcp.server.stdio import stdio_server

    server = built(root)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


def built(root: Path) -> Any:
    """The server, whose calls are answered one after another."""
    import anyio
    from anyio import to_thread
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

    from memplan import __version__
    from memplan.cli.agent_tools import agent_tools, call

    turn = anyio.Lock()
    tools = [
        Tool(name=each.name, description=each.description, input_schema=dict(each.schema))
        for each in agent_tools()
    ]

    async def on_list_tools(_: Any, __: Any) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def on_call_tool(_: Any, params: Any) -> CallToolResult:
        arguments: Mapping[str, Any] = params.arguments or {}
        async with turn:
            answer = await to_thread.run_sync(call, params.name, arguments, root)
        return CallToolResult(
            content=[TextContent(type="text", text=answer.text)], is_error=answer.is_error
        )

    return Server(
        "memplan",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=on_list_tools,
        on_call_tool=on_call_tool,
    )
