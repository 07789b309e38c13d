"""Published formulas of what the optimizer and the weights hold."""

from memplan.formulas.deepspeed import (
    DeepSpeedFormula,
    DeepSpeedOffload,
    zero2_gpu_bytes,
    zero3_gpu_bytes,
)
from memplan.formulas.states import (
    FP32_STATES,
    MIXED_STATES,
    table_bytes,
    zero_state_bytes,
    zero_state_equation,
)
from memplan.report.formulas.case import NO_ACTIVATIONS, Case, MethodRow


def deepspeed_rows(case: Case) -> list[MethodRow]:
    """DeepSpeed's estimators, as documented and as they are now."""
    params, gpus = case.counts.total, case.setup.num_gpus
    rows = []
    for formula, source, equation in (
        (DeepSpeedFormula.DOCUMENTED, "its documentation; up to 0.14.2", "4Φ + 16Φ/n"),
        (DeepSpeedFormula.CURRENT, "stage_1_and_2.py:4017, since 0.14.3", "2Φ + 18Φ/n"),
    ):
        found = zero2_gpu_bytes(params, num_gpus=gpus, offload_optimizer=False, formula=formula)
        rows.append(
            _states_row(
                f"DeepSpeed, {formula.value}", "ZeRO-2", found,
                equation, source,
            )
        )  # fmt: skip
    largest = case.counts.largest_layer
    found = zero3_gpu_bytes(
        params, largest_layer_params=largest, num_gpus=gpus, offload=DeepSpeedOffload.NONE
    )
    rows.append(_states_row("DeepSpeed", "ZeRO-3", found, "4Λ + 18Φ/n", "stage3.py:4016"))
    return rows


def rule_rows(case: Case) -> list[MethodRow]:
    """The rule of sixteen bytes a parameter over ZeRO's stages."""
    rows = []
    for stage in range(4):
        found = zero_state_bytes(
            case.counts.total, num_gpus=case.setup.num_gpus, stage=stage, precision=case.precision
        )
        equation = zero_state_equation(stage=stage, precision=case.precision)
        rows.append(
            _states_row(
                "rule of thumb", f"ZeRO-{stage}", int(found),
                equation, "(p + p + 12)Φ over ZeRO's stages: arXiv:1910.02054, figure 1",
            )
        )  # fmt: skip
    return rows


def table_rows(case: Case) -> list[MethodRow]:
    """The bytes of a parameter that tables list."""
    rows = []
    for name, table in (("fp32", FP32_STATES), ("mixed", MIXED_STATES)):
        found = table_bytes(case.counts.total, table=table)
        parts = " + ".join(str(num_bytes) for _, num_bytes in table)
        rows.append(
            _states_row(
                "16 bytes a parameter", name, found, f"({parts})Φ",
                "arXiv:1910.02054, section 3.1; on one GPU",
            )
        )  # fmt: skip
    return rows


def _states_row(method: str, setting: str, num_bytes: int, formula: str, source: str) -> MethodRow:
    return MethodRow(
        method=method, setting=setting, states_bytes=num_bytes, activations_bytes=None,
        total_bytes=num_bytes, formula=formula, source=source, leaves_out=NO_ACTIVATIONS,
    )  # fmt: skip
