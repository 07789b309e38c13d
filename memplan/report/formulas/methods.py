"""Every method side by side: what each counts, with its numbers put in, and what it leaves out.

This is where two calculators that disagree are seen to answer different questions.
"""

from collections.abc import Sequence

from memplan.errors import SetupError
from memplan.estimator import Estimate, estimate
from memplan.graph.counts import count_parameters
from memplan.memory.account import Lifetime
from memplan.model.spec import ModelSpec
from memplan.report.formulas.activations import activation_rows, square_root_row
from memplan.report.formulas.case import Case, MethodRow, known_shape
from memplan.report.formulas.states import deepspeed_rows, rule_rows, table_rows
from memplan.report.formulas.whole import article_rows, megatron_row
from memplan.training.setup import TrainingSetup


def compare_methods(
    model: ModelSpec, setups: Sequence[TrainingSetup]
) -> tuple[tuple[MethodRow, ...], tuple[str, ...]]:
    """The rows of every method, and why memplan has none where a setup cannot be trained.

    All setups share their model, batch, sequence and number of GPUs.
    """
    own, refused = _own_rows(model, setups)
    return (*own, *published_rows(model, setups[0])), refused


def published_rows(model: ModelSpec, setup: TrainingSetup) -> tuple[MethodRow, ...]:
    """The rows of every method but memplan's own."""
    case = Case(model, setup.resolve(model.context_length), count_parameters(model))
    shape = known_shape(model)
    rows = [*deepspeed_rows(case), *rule_rows(case), *table_rows(case)]
    if shape is not None:
        rows += [
            *activation_rows(case, shape),
            square_root_row(case, shape),
            *article_rows(case, shape),
            megatron_row(case, shape),
        ]
    return tuple(rows)


def _own_rows(
    model: ModelSpec, setups: Sequence[TrainingSetup]
) -> tuple[list[MethodRow], tuple[str, ...]]:
    rows, refused = [], []
    for setup in setups:
        try:
            rows.append(_own_row(estimate(model, setup)))
        except SetupError as error:
            refused.append(str(error))
    return rows, tuple(dict.fromkeys(refused))


def _own_row(found: Estimate) -> MethodRow:
    from memplan.report.estimates.changes import setup_label

    peak = found.account.peak
    states = sum(entry.num_bytes for entry in peak.entries if entry.kind.lifetime is Lifetime.LONG)
    left_out = "; ".join(found.unmodelled)
    return MethodRow(
        method="memplan (tape)",
        setting=setup_label(found.setup),
        states_bytes=states,
        activations_bytes=found.activations_bytes,
        total_bytes=found.peak_bytes,
        formula=f"peak in {found.peak_phase}",
        source=f"memplan explain; {found.attention_kernel} attention",
        leaves_out=left_out or "fragmentation, NCCL and the CUDA context, which are ranges",
    )
