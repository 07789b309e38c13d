"""The account of a small model under any setup."""

from collections.abc import Callable
from typing import Any

import pytest

from memplan.memory.account import RankAccount
from memplan.memory.accounts import rank_account
from memplan.memory.deepspeed.partition import ModelWeights
from tests.memory.deepspeed.small_model import SMALL, given_for

Account = Callable[..., RankAccount]


@pytest.fixture
def account() -> Account:
    """The account of the small model under a setup."""

    def make(
        rank: int = 0, *, config: dict[str, Any] = SMALL, capacity: int | None = None, **fields: Any
    ) -> RankAccount:
        given = given_for(config, **fields)
        return rank_account(given, rank=rank, capacity_bytes=capacity)

    return make


@pytest.fixture
def weights() -> ModelWeights:
    """The small model's parameters."""
    return ModelWeights(given_for(SMALL).tape)
