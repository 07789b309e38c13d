"""Published tokens per second, and memplan's for the same runs.

Settings come from the translators of the memory records (``tests/measured/stacks``); what a source's hardware or
kernels were beside them is here, each with where it is stated. Nothing was inferred from a measured rate.

NeMo's LoRA rows run with adapters in the base's format (``lora_dtype`` is None) and Liger's kernels (``use_liger_kernel``
is True by default, nemo_automodel/_transformers/auto_model.py), read there after peft's own defaults had given -42 %; its
Triton kernels of LoRA are not modelled. Rows of TFLOP/s are turned into tokens by their source's formula (equation 3 of
arXiv:2104.04473).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from statistics import median
from typing import Any

import memplan
from memplan.compute.rates import Rates, rates_of
from memplan.errors import MemplanError
from memplan.estimator.job import Job
from memplan.estimator.time.step_time import StepTime, time_of
from memplan.graph.core.operation_kinds import OperationKind
from memplan.hardware.gpu import GpuSpec
from tests.measured.runs import LackingError, NotExpressibleError, Run, card_of, record_from
from tests.measured.stacks import translate

ALIKE = 0.02
"""Rates of two setups that differ by less have no order."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A published rate beside memplan's."""

    row: Mapping[str, Any]
    time: StepTime

    @property
    def published(self) -> float:
        """Tokens per second and GPU."""
        return float(self.row["tokens_per_s_per_gpu"])

    @property
    def predicted(self) -> float:
        return self.time.tokens_per_s_per_gpu

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def published_mfu(self) -> float:
        """By memplan's convention, so that the two can be compared."""
        return self.time.mfu * self.published / self.predicted

    @property
    def is_inside(self) -> bool:
        """Whether the published step is within the range."""
        seconds = self.time.expected_s * self.predicted / self.published
        return self.time.low_s <= seconds <= self.time.high_s


@dataclass
class Comparison:
    """All rates that could be predicted."""

    found: list[Rate]
    refused: dict[str, str]
    """Row id -> why."""

    def errors(self, start: str = "") -> list[float]:
        """Of the rows whose id begins so, without their signs."""
        return [abs(each.error) for each in self.found if str(each.row["id"]).startswith(start)]

    def share_within(self, bar: float) -> float:
        errors = self.errors()
        return sum(error <= bar for error in errors) / len(errors)

    @property
    def median(self) -> float:
        return median(self.errors())

    def order(self) -> tuple[int, int]:
        """Pairs of setups of one source, model, card and number of GPUs, and how many stand in order."""
        groups: dict[object, list[Rate]] = {}
        for each in self.found:
            key = tuple(each.row[name] for name in ("source", "model", "gpu", "n_gpus"))
            groups.setdefault(key, []).append(each)
        pairs = [
            (one, other)
            for group in groups.values()
            for one, other in combinations(group, 2)
            if abs(one.published / other.published - 1) >= ALIKE
        ]
        right = sum(
            (one.published > other.published) == (one.predicted > other.predicted)
            for one, other in pairs
        )
        return len(pairs), right

    def table(self) -> str:
        """Predicted beside published MFU, source by source."""
        lines = [f"{'run':64s} {'published':>9s} {'predicted':>9s} {'error':>6s}"]
        for each in self.found:
            lines.append(
                f"{str(each.row['id'])[:64]:64s} {each.published_mfu:9.1%} {each.time.mfu:9.1%} "
                f"{each.error:+6.0%}{'' if each.is_inside else ' outside the range'}"
            )
        return "\n".join(lines)


def predicted(rows: Iterable[Mapping[str, Any]]) -> Comparison:
    """Every row's time; a setup that memplan refuses is told with why."""
    found, refused = [], {}
    for row in rows:
        try:
            found.append(Rate(row=row, time=_time(row, _run_of(row))))
        except (MemplanError, NotExpressibleError) as error:
            refused[str(row["id"])] = str(error)
    return Comparison(found=found, refused=refused)


RL_LOSS = (
    "its RL trainer's loss (prime_rl/trainer/models/layers/lm_head.py) goes over pieces of tokens and words in "
    "PyTorch's own operations and asks the GPU for a value in each: no loss of memplan's does"
)


def _run_of(row: Mapping[str, Any]) -> Run:
    """What was run: said outright, or in the words of its source."""
    if "setup" not in row:
        return translate(record_from(row))
    sizes = {
        "num_gpus": row["n_gpus"], "micro_batch_size": row["micro_batch"], "seq_len": row["seq_len"]
    }  # fmt: skip
    setup = row["setup"] | sizes
    if "adapter" in row:
        setup["adapter"] = memplan.Lora(**row["adapter"])
    return Run(model=row["config"], gpu=card_of(row), setup=setup)


def _time(row: Mapping[str, Any], run: Run) -> StepTime:
    if row.get("other") == "trainer rl":
        raise LackingError(feature=RL_LOSS)
    setup = dict(run.setup)
    setup.pop("offload_activations", None)
    if "tp" in row:
        setup |= {"tensor_parallel": row["tp"], "sequence_parallel": True, "loss_parallel": True}
    gpu = _card(run.gpu, str(row["gpu"]))
    job = Job.of(_model(str(sorted(_flat(run.model)))), memplan.TrainingSetup(**setup), gpu)
    return time_of(job, rates=_kernels_of(str(row["id"]), gpu))


def _kernels_of(row_id: str, gpu: GpuSpec) -> Rates | None:
    """A source's own kernels, where no setup says them."""
    if row_id.startswith("lf-"):
        return first_flash(gpu)
    return at_once(gpu) if "autogptq" in row_id else None


_CONFIGS: dict[str, str | dict[str, Any]] = {}


def _flat(model: str | dict[str, Any]) -> Iterable[tuple[str, str]]:
    items = [("name", model)] if isinstance(model, str) else list(model.items())
    found = [(key, str(value)) for key, value in items]
    _CONFIGS[str(sorted(found))] = model
    return found


@cache
def _model(key: str) -> Any:
    return memplan.load_model(_CONFIGS[key])


GRAND_TETON_WATTS = 500
"""torchtitan's H100 run at 500 W of 700, with HBM2e of 2.4 TB/s (benchmarks/llama3_h100_202412_torchtitan.md).
A chip's power grows with the cube of its clock: the rate with the power's cube root."""


@cache
def _card(name: str, stated: str) -> GpuSpec:
    if "HBM2e" not in stated:
        return memplan.load_gpu(name)
    gpu = memplan.load_gpu("h100-sxm-80gb")
    best = gpu.measured_tflops.bf16
    assert best is not None
    slowed = best * (GRAND_TETON_WATTS / 700) ** (1 / 3)
    return replace(
        gpu,
        bandwidth_bytes_per_s=2_400_000_000_000,
        measured_tflops=replace(gpu.measured_tflops, bf16=slowed),
    )


@cache
def at_once(gpu: GpuSpec) -> Rates:
    """fms-acceleration brings AutoGPTQ's Triton kernels along (plugins/accelerated-peft, ``triton_v2``)."""
    return replace(rates_of(gpu), unpacks_at_once=True)


@cache
def first_flash(gpu: GpuSpec) -> Rates:
    """A card with kernels of FlashAttention's first form alone: llm-foundry's ``attn_impl: triton``, which its
    yamls name until April 2024 (#1128), three months after the last of its tables (#838)."""
    rates = rates_of(gpu)
    first = rates.attention[OperationKind.EFFICIENT_ATTENTION]
    return replace(rates, attention=dict.fromkeys(rates.attention, first))
