import pytest

from memplan.estimator import Estimate, Verdict, estimate
from memplan.hardware.gpu import gpu_from_memory
from memplan.search.checks import FailOn, FitCheck, Scope
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

MODEL = load_model("gpt2")


def test_nothing_seen_is_no_pass() -> None:
    assert not FitCheck(Scope.ALL).passed
    assert not FitCheck(Scope.ANY).passed


@pytest.mark.parametrize("scope", Scope)
def test_states_that_fit_are_not_enough_where_tight_fails(scope: Scope) -> None:
    setup = TrainingSetup(seq_len=128, left_out="a reference model")
    found = estimate(MODEL, setup, gpu_from_memory(2**36))
    assert found.verdict is Verdict.STATES_FIT
    check = FitCheck(scope, FailOn.TIGHT)
    check.add(found)
    assert not check.passed


def answer(verdict: Verdict) -> Estimate:
    """An estimate on a card of just the size that gives the verdict."""
    setup = TrainingSetup(seq_len=128)
    total = estimate(MODEL, setup).total_bytes
    sizes = {Verdict.FITS: total.high, Verdict.TIGHT: total.low, Verdict.OOM: total.low - 1}
    found = estimate(
        MODEL, setup, gpu_from_memory(sizes[verdict] + 2**26 * (verdict is Verdict.FITS))
    )
    assert found.verdict is verdict
    return found


@pytest.mark.parametrize(
    ("scope", "fail_on", "verdicts", "passed"),
    [
        pytest.param(Scope.ALL, FailOn.OOM, [Verdict.FITS, Verdict.TIGHT], True, id="tight passes"),
        pytest.param(Scope.ALL, FailOn.OOM, [Verdict.FITS, Verdict.OOM], False, id="one OOM"),
        pytest.param(
            Scope.ALL, FailOn.TIGHT, [Verdict.FITS, Verdict.TIGHT], False, id="tight fails"
        ),
        pytest.param(Scope.ANY, FailOn.OOM, [Verdict.OOM, Verdict.TIGHT], True, id="any tight"),
        pytest.param(Scope.ANY, FailOn.TIGHT, [Verdict.OOM, Verdict.TIGHT], False, id="none fits"),
        pytest.param(Scope.ANY, FailOn.OOM, [Verdict.OOM, Verdict.OOM], False, id="all OOM"),
    ],
)
def test_checks(scope: Scope, fail_on: FailOn, verdicts: list[Verdict], passed: bool) -> None:
    check = FitCheck(scope, fail_on)
    for verdict in verdicts:
        check.add(answer(verdict))
    assert check.passed is passed
    assert f"of {len(verdicts)}" in check.message
