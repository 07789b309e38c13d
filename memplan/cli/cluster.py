"""``--dask``: a cluster's workers as an executor."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor

PATIENCE_S = 10
"""How long a scheduler and its first worker are waited for."""


@contextmanager
def dask_executor(address: str) -> "Iterator[Executor]":
    """The workers of the scheduler at an address.

    Raises ``UsageError`` where Dask is not installed, nobody answers there, there is no worker, or one runs another memplan.
    """
    import logging

    from memplan.errors import UsageError
    from memplan.text import one_line

    try:
        from distributed import Client
    except ImportError:
        msg = '--dask: Dask is not installed: pip install "memplan[dask]"'
        raise UsageError(msg) from None
    # It tells of every worker that goes, and of work that is handed on: the answer is the same. Some of its loggers have a
    # level of their own.
    for name in [
        each for each in logging.root.manager.loggerDict if each.startswith("distributed")
    ]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(address, timeout=PATIENCE_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        msg = f"--dask: no scheduler answers at {address}: {one_line(str(error))[:200]}"
        raise UsageError(msg) from None
    try:
        _check_workers(client, address)
        yield client.get_executor()
    finally:
        client.close()


def _check_workers(client: Any, address: str) -> None:
    """Raise ``UsageError`` where there is no worker, or one whose answers might differ."""
    from memplan.errors import UsageError
    from memplan.text import one_line
    from memplan.version import __version__

    try:
        client.wait_for_workers(1, timeout=PATIENCE_S)
    except TimeoutError:
        msg = f"--dask: the scheduler at {address} has no workers: start some with `dask worker {address}`"
        raise UsageError(msg) from None
    try:
        versions = client.run(version_here)
    except Exception as error:  # noqa: BLE001 - whatever importing memplan there comes to
        msg = f"--dask: the workers of {address} have no memplan: {one_line(str(error))[:200]}"
        raise UsageError(msg) from None
    others = {worker: each for worker, each in versions.items() if each != __version__}
    for worker, each in others.items():
        msg = f"--dask: {worker} runs memplan {each}, and this is {__version__}: install the same"
        raise UsageError(msg)


def version_here() -> str:
    """Of the memplan that a worker has."""
    from memplan.version import __version__

    return __version__
