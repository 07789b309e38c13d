"""Configurations written as Python functions, whose text is read: nothing of it is run."""

PYTHON = ".py"


def split_name(path: str) -> tuple[str, str | None]:
    """A file, and the function in it that is meant.

    >>> split_name("llama3/config_registry.py:llama3_8b")
    ('llama3/config_registry.py', 'llama3_8b')
    >>> split_name("run.yaml")
    ('run.yaml', None)
    """
    file, mark, name = path.rpartition(f"{PYTHON}:")
    return (f"{file}{PYTHON}", name) if mark else (path, None)


def registered(module: str, config: str) -> str:
    """The function that torchtitan's ``--module`` and ``--config`` name, below its own folder (``config/manager.py``).

    >>> registered("llama3", "llama3_8b")
    'torchtitan/models/llama3/config_registry.py:llama3_8b'
    """
    return f"torchtitan/models/{module.replace('.', '/')}/config_registry{PYTHON}:{config}"
