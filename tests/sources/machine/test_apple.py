"""A Mac's GPU, with ``sysctl`` answered for."""

import pytest

from memplan.hardware.managers import MemoryManager
from memplan.sources.machine import apple
from memplan.sources.machine.asking import CardsUnreadableError
from memplan.sources.machine.local_gpu import gpu_of


def answered(monkeypatch: pytest.MonkeyPatch, text: str, platform: str = "darwin") -> None:
    monkeypatch.setattr(apple.sys, "platform", platform)
    monkeypatch.setattr(apple, "answer_of", lambda _: text)


@pytest.mark.parametrize(
    ("said", "gpu_id", "mib"),
    [
        ("Apple M4 Max\n137438953472\n", "m4-max-128gb", 98304),
        ("Apple M3 Pro\n38654705664\n", "custom-24gib", 24576),
    ],
)
def test_a_mac(monkeypatch: pytest.MonkeyPatch, said: str, gpu_id: str, mib: int) -> None:
    answered(monkeypatch, said)
    cards = apple.apple_cards()
    assert cards is not None
    found = gpu_of(cards[0])
    assert (found.gpu_id, found.capacity_bytes // 2**20) == (gpu_id, mib)
    assert found.manager is MemoryManager.MPS


def test_no_mac_and_one_of_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, "Apple M4 Max\n137438953472\n", platform="linux")
    assert apple.apple_cards() is None
    answered(monkeypatch, "Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz\n34359738368\n")
    assert apple.apple_cards() is None


@pytest.mark.parametrize(
    "said", ["Apple M4", "Apple M4\n", "Apple M4\nmuch\n", "Apple M4\n-1\n", "Apple M4\n0"]
)
def test_half_an_answer(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    answered(monkeypatch, said)
    with pytest.raises(CardsUnreadableError, match="told no size of the memory"):
        apple.apple_cards()
