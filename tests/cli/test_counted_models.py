"""A model whose activations are left out is answered like any other: its states, against the usual cards."""

from collections.abc import Callable
from typing import Any

import pytest

from memplan.sources.about_models.registry import builtin_names, find_builtin
from memplan.sources.models import load_model

pytestmark = pytest.mark.long


def counted_models() -> list[str]:
    """One built-in model of every family that is only counted."""
    found: dict[str, str] = {}
    for name in builtin_names():
        entry = find_builtin(name)
        assert entry is not None
        if entry.family not in found and load_model(name).activations_left_out:
            found[entry.family] = name
    return list(found.values())


def test_a_table_without_options(run: Callable[..., Any]) -> None:
    for name in counted_models():
        answered = run("estimate", name)
        assert answered.exit_code == 0, answered.stderr
        assert answered.stdout.startswith(name)
        assert "activations" in answered.stdout, name
        assert " fits " not in answered.stdout, name
