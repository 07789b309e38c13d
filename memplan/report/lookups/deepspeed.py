"""DeepSpeed's estimator tables, laid out as people know them, and as rows for scripts.

The layout of a row (CPU column 7 wide, GPU column 6 wide, two decimals, device names padded to
four) is that of DeepSpeed's printers; figures are GiB under the label GB, as theirs are, and a
footnote says so. Option text is the documented one: on Python 3.11 and newer DeepSpeed itself
prints ``OffloadDeviceEnum.cpu`` where its documentation has ``cpu``.
"""

from typing import TYPE_CHECKING

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.formulas.deepspeed import (
    DeepSpeedCase,
    DeepSpeedFormula,
    DeepSpeedOffload,
    DeepSpeedRow,
    largest_layer_bytes,
    zero2_table,
    zero3_gpu_bytes,
    zero3_pinned_bytes,
    zero3_table,
)
from memplan.units import GIB, MIB

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console

DEEPSPEED_SCHEMA_VERSION = 1
"""Raised when a key of ``deepspeed_document`` changes its name or its meaning."""

_OWN_WORDS = "Estimated memory needed for params, optim states and gradients for a:"
"""What DeepSpeed prints above each of its tables (``stage3.py``, ``stage_1_and_2.py``)."""
_COLUMNS = "  per CPU  |  per GPU |   Options"

_EQUATIONS = {
    DeepSpeedFormula.DOCUMENTED: "4 x params + 16 x params / GPUs",
    DeepSpeedFormula.CURRENT: "2 x params + 18 x params / GPUs",
}

_RELEASES = {
    DeepSpeedFormula.DOCUMENTED: "documentation; up to 0.14.2",
    DeepSpeedFormula.CURRENT: "since 0.14.3, June 2024",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedReport:
    """DeepSpeed's two tables for one model on one cluster."""

    case: DeepSpeedCase
    """What the estimators were asked about."""
    formula: DeepSpeedFormula
    """Which ZeRO-2 formula was used."""
    zero2_rows: tuple[DeepSpeedRow, ...]
    """The ZeRO-2 table, in DeepSpeed's order."""
    zero3_rows: tuple[DeepSpeedRow, ...]
    """The ZeRO-3 table, in DeepSpeed's order; empty where no largest layer is known."""


def deepspeed_report(
    *,
    total_params: int,
    largest_layer_params: int | None,
    num_gpus_total: int,
    num_nodes: int,
    formula: DeepSpeedFormula,
    additional_buffer_factor: float,
) -> DeepSpeedReport:
    """Work out both tables; ``num_gpus_total`` counts the GPUs of all nodes.

    Raises ``SetupError`` when the nodes do not divide the GPUs, and for counts that cannot be.
    """
    case = DeepSpeedCase(
        total_params=total_params,
        largest_layer_params=largest_layer_params,
        num_gpus_per_node=_gpus_per_node(num_gpus_total, num_nodes=num_nodes),
        num_nodes=num_nodes,
        additional_buffer_factor=additional_buffer_factor,
    )
    return DeepSpeedReport(
        case=case,
        formula=formula,
        zero2_rows=zero2_table(case, formula=formula),
        zero3_rows=zero3_table(case),
    )


def deepspeed_text(report: DeepSpeedReport) -> str:
    """Lay out both tables, the pinned memory and the footnotes as plain text.

    >>> report = deepspeed_report(
    ...     total_params=2_851_598_336,
    ...     largest_layer_params=32_899_072,
    ...     num_gpus_total=8,
    ...     num_nodes=1,
    ...     formula=DeepSpeedFormula.DOCUMENTED,
    ...     additional_buffer_factor=1.5,
    ... )
    >>> print("\\n".join(deepspeed_text(report).splitlines()[:9]))
    DeepSpeed's estimate for ZeRO-2
    Estimated memory needed for params, optim states and gradients for a:
    HW: Setup with 1 node, 8 GPUs per node.
    SW: Model with 2851M total params.
      per CPU  |  per GPU |   Options
      127.48GB |   5.31GB | offload_optimizer=cpu
      127.48GB |  15.93GB | offload_optimizer=none
    ZeRO-2 formula: documented (documentation; up to 0.14.2)
      per GPU with offload_optimizer=none: 4 x params + 16 x params / GPUs
    """
    largest = report.case.largest_layer_params
    if largest is None:
        zero3 = ["ZeRO-3 is left out: its table needs --largest-layer, the parameters of one layer"]
    else:
        zero3 = [*_zero3_lines(report, largest), "", *_megabyte_lines(report.case, largest)]
    return "\n".join(
        [
            *_zero2_lines(report),
            "",
            *zero3,
            "",
            *_pinned_lines(report.case),
            "",
            *_ram_lines(),
            "",
            *_footnotes(report.case),
        ]
    )


def print_deepspeed(console: "Console", report: DeepSpeedReport) -> None:
    """Print the text with its titles in bold; no line is wrapped and no bracket is markup."""
    from rich.text import Text

    text = Text(deepspeed_text(report))
    text.highlight_regex(r"(?m)^DeepSpeed's estimate for ZeRO-\d", "bold")
    console.print(text, soft_wrap=True)


def deepspeed_rows(report: DeepSpeedReport) -> list[dict[str, int | str | bool | None]]:
    """Return the rows of both tables for scripts: bytes are integers, None is "not given".

    ``documented_cpu_bytes`` is given where the documentation has another formula than the code. Pinned
    bytes are part of ``per_cpu_bytes``; DeepSpeed's documentation has none for ZeRO-2.
    """
    rows = (*report.zero2_rows, *report.zero3_rows)
    return [_row_mapping(row, total_params=report.case.total_params) for row in rows]


def deepspeed_document(report: DeepSpeedReport) -> dict[str, object]:
    """Return the whole answer for ``--format json``: version, assumptions and rows."""
    case = report.case
    return {
        "schema_version": DEEPSPEED_SCHEMA_VERSION,
        "assumptions": {
            "estimator": "deepspeed",
            "zero2_formula": report.formula.value,
            "total_params": case.total_params,
            "largest_layer_params": case.largest_layer_params,
            "num_gpus": case.num_gpus,
            "num_nodes": case.num_nodes,
            "num_gpus_per_node": case.num_gpus_per_node,
            "additional_buffer_factor": case.additional_buffer_factor,
        },
        "rows": deepspeed_rows(report),
    }


def option_text(row: DeepSpeedRow) -> str:
    """Write a row's options as DeepSpeed's documentation does.

    >>> option_text(
    ...     DeepSpeedRow(
    ...         zero_stage=3,
    ...         offload=DeepSpeedOffload.OPTIMIZER,
    ...         zero_init=True,
    ...         per_cpu_bytes=0,
    ...         per_gpu_bytes=0,
    ...     )
    ... )
    'offload_param=none, offload_optimizer=cpu , zero_init=1'
    """
    if row.zero_init is None:
        return f"offload_optimizer={_device(offloaded=row.offload_optimizer)}"
    return (
        f"offload_param={_device(offloaded=row.offload_param):4}, "
        f"offload_optimizer={_device(offloaded=row.offload_optimizer):4}, "
        f"zero_init={int(row.zero_init)}"
    )


def _gpus_per_node(num_gpus_total: int, *, num_nodes: int) -> int:
    if num_gpus_total < 1 or num_nodes < 1:
        msg = f"{num_gpus_total} GPUs on {num_nodes} nodes: give at least 1 of each"
        raise SetupError(msg)
    if num_gpus_total % num_nodes:
        msg = (
            f"{num_gpus_total} GPUs cannot be spread evenly over {num_nodes} nodes, and DeepSpeed "
            f"counts GPUs per node: change the GPUs (in all) or the nodes"
        )
        raise SetupError(msg)
    return num_gpus_total // num_nodes


def _zero2_lines(report: DeepSpeedReport) -> list[str]:
    other = next(formula for formula in DeepSpeedFormula if formula is not report.formula)
    return [
        "DeepSpeed's estimate for ZeRO-2",
        _OWN_WORDS,
        _hardware_line(report.case),
        f"SW: Model with {_millions(report.case.total_params)} total params.",
        _COLUMNS,
        *(_row_line(row) for row in report.zero2_rows),
        *_two_forms(report),
        f"ZeRO-2 formula: {report.formula.value} ({_RELEASES[report.formula]})",
        f"  per GPU with offload_optimizer=none: {_EQUATIONS[report.formula]}",
        f"  for the other: --deepspeed-formula {other.value} ({_RELEASES[other]})",
    ]


def _two_forms(report: DeepSpeedReport) -> list[str]:
    """RAM of a node where documentation and code differ: on several nodes."""
    return [
        line
        for row in report.zero2_rows
        if row.documented_cpu_bytes is not None
        for line in (
            "per CPU with offload_optimizer=cpu has two forms on several nodes:",
            f"  by the code {_gigabytes(row.per_cpu_bytes)} (4 x params x all GPUs)",
            f"  documented {_gigabytes(row.documented_cpu_bytes)} (4 x params x a node's GPUs)",
        )
    ]


def _zero3_lines(report: DeepSpeedReport, largest_layer_params: int) -> list[str]:
    case = report.case
    total, largest = _millions(case.total_params), _millions(largest_layer_params)
    return [
        "DeepSpeed's estimate for ZeRO-3",
        _OWN_WORDS,
        _hardware_line(case),
        f"SW: Model with {total} total params, {largest} largest layer params.",
        _COLUMNS,
        *(_row_line(row) for row in report.zero3_rows),
    ]


def _megabyte_lines(case: DeepSpeedCase, largest: int) -> list[str]:
    layer = _megabytes(largest_layer_bytes(largest))
    neither, both, optimizer = (
        _case_megabytes(case, largest, offload=offload)
        for offload in (
            DeepSpeedOffload.NONE,
            DeepSpeedOffload.OPTIMIZER_AND_PARAM,
            DeepSpeedOffload.OPTIMIZER,
        )
    )
    return [
        "ZeRO-3 per GPU in MB, the cases of DeepSpeed's documentation",
        f"  total params: {case.total_params / 1e6:.2f}M",
        f"  largest layer params: {largest / 1e6:.2f}M",
        f"  largest layer memory: {layer}",
        f"  case 1, nothing on the CPU: {neither}",
        f"  case 2, optimizer and parameters on the CPU: {both}",
        f"  case 3, optimizer on the CPU: {optimizer}",
    ]


def _case_megabytes(case: DeepSpeedCase, largest: int, *, offload: DeepSpeedOffload) -> str:
    return _megabytes(
        zero3_gpu_bytes(
            case.total_params,
            largest_layer_params=largest,
            num_gpus=case.num_gpus,
            offload=offload,
        )
    )


def _pinned_lines(case: DeepSpeedCase) -> list[str]:
    both, both_accumulating, optimizer = (
        _gigabytes(
            zero3_pinned_bytes(
                case.total_params, offload=offload, gradient_accumulation=gradient_accumulation
            )
        )
        for offload, gradient_accumulation in (
            (DeepSpeedOffload.OPTIMIZER_AND_PARAM, False),
            (DeepSpeedOffload.OPTIMIZER_AND_PARAM, True),
            (DeepSpeedOffload.OPTIMIZER, False),
        )
    )
    return [
        "Pinned memory with pin_memory, over all nodes (part of per CPU, not added to it)",
        f"  ZeRO-3, offload_param=cpu: {both} (6 bytes x params)",
        f"  ZeRO-3, the same, gradient accumulation: {both_accumulating} (8 bytes x params)",
        f"  ZeRO-3, offload_optimizer=cpu only: {optimizer} (4 bytes x params)",
        "  ZeRO-2: cannot be controlled, no figure documented",
    ]


def _ram_lines() -> list[str]:
    """RAM of a node in letters, for each row of the tables."""
    return [
        "per CPU in letters: P parameters, L of the largest layer, n nodes,",
        "g GPUs a node, G = n x g, k = additional_buffer_factor",
        "  ZeRO-2, offload_optimizer=cpu: P x max(4G, 16) x k",
        "  ZeRO-2, offload_optimizer=none: 4P x g x k",
        "  ZeRO-3, offload_param=cpu, zero_init=1: 18P / n x k",
        "  ZeRO-3, offload_param=cpu, zero_init=0: P x max(4g, 18 / n) x k",
        "  ZeRO-3, offload_optimizer=cpu, zero_init=1: 16P / n x k",
        "  ZeRO-3, offload_optimizer=cpu, zero_init=0: P x max(4g, 16 / n) x k",
        "  ZeRO-3, nothing on the CPU, zero_init=1: 4L x g x k",
        "  ZeRO-3, nothing on the CPU, zero_init=0: 4P x g x k",
        "4 is the model built in fp32, once in each process; 16 are the optimizer's",
        "fp32 weights, gradients and two states of Adam, 4 each; 18 are these and the",
        "16-bit weights.",
    ]


def _footnotes(case: DeepSpeedCase) -> list[str]:
    factor = f"{case.additional_buffer_factor:g}"
    return [
        "GB above is GiB (2^30 bytes), MB is MiB (2^20, cut off), as DeepSpeed prints.",
        f"per CPU is the RAM of one node, times additional_buffer_factor {factor}.",
        "Left out by DeepSpeed's estimators: activations, logits, buckets, gathered",
        "parameters, the CUDA context: run without --deepspeed for memplan's own.",
    ]


def _hardware_line(case: DeepSpeedCase) -> str:
    nodes = "nodes" if case.num_nodes > 1 else "node"
    gpus = "GPUs" if case.num_gpus_per_node > 1 else "GPU"
    return f"HW: Setup with {case.num_nodes} {nodes}, {case.num_gpus_per_node} {gpus} per node."


def _row_line(row: DeepSpeedRow) -> str:
    per_cpu = f"{row.per_cpu_bytes / GIB:7.2f}GB"
    per_gpu = f"{row.per_gpu_bytes / GIB:6.2f}GB"
    return f" {per_cpu} | {per_gpu} | {option_text(row)}"


def _row_mapping(row: DeepSpeedRow, *, total_params: int) -> dict[str, int | str | bool | None]:
    return {
        "zero_stage": row.zero_stage,
        "offload_param": _device(offloaded=row.offload_param),
        "offload_optimizer": _device(offloaded=row.offload_optimizer),
        "zero_init": row.zero_init,
        "per_cpu_bytes": row.per_cpu_bytes,
        "documented_cpu_bytes": row.documented_cpu_bytes,
        "per_gpu_bytes": row.per_gpu_bytes,
        "pinned_bytes": _pinned(row, total_params, gradient_accumulation=False),
        "pinned_accumulating_bytes": _pinned(row, total_params, gradient_accumulation=True),
    }


def _pinned(row: DeepSpeedRow, total_params: int, *, gradient_accumulation: bool) -> int | None:
    if row.zero_stage == 2:
        return None
    return zero3_pinned_bytes(
        total_params, offload=row.offload, gradient_accumulation=gradient_accumulation
    )


def _device(*, offloaded: bool) -> str:
    return "cpu" if offloaded else "none"


def _millions(count: int) -> str:
    return f"{count // 10**6}M"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}GB"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes // MIB}MB"
