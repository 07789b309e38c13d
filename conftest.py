from pathlib import Path
import pytest
from _pytest.doctest import DoctestModule
@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path):
    found = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text(encoding="utf-8"):
        return [e for e in found if not isinstance(e, DoctestModule)]
    return found
