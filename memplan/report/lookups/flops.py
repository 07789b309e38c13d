"""FLOPs of a step by component, and by others' formulas side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.compute.flops import ScoreCount, StepFlops
from memplan.errors import UnsupportedOperationError
from memplan.fast_dataclass import dataclass
from memplan.formulas.flops import (
    FormulaShape,
    kaplan_flops,
    layer_flops_letters,
    llm_foundry_flops,
    megatron_flops,
    narayanan_flops,
    palm_flops,
    torchtitan_flops,
)
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import active_parameters, component_parameters, total_parameters
from memplan.graph.model import record_model
from memplan.model.spec import ModelSpec
from memplan.report.estimates.assumed import print_assumptions
from memplan.report.rows.written import rows_csv, rows_json, rows_markdown
from memplan.report.shape import formula_shape, shape_notes
from memplan.report.terminal.narrow import print_table
from memplan.training.choices import Recomputation, checkpointing_text
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.setup import TrainingSetup
from memplan.units import format_count

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.terminal.console import Console

FLOPS_SCHEMA_VERSION = 2
"""Raised when a key of a row changes its name or its meaning."""
TERA = 10**12
GIGA = 10**9
CONVENTIONS = {
    ScoreCount.FULL: "every query with every key",
    ScoreCount.CAUSAL: "only what the mask lets through",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsMethod:
    """One published formula's figure for the same micro-batch."""

    name: str
    flops: int
    """Forward and backward; recomputation only where ``recomputes``."""
    equation: str
    scores: str
    """Whether masked scores are counted."""
    source: str
    recomputes: bool = False


def flops_methods(model: ModelSpec, setup: TrainingSetup) -> tuple[FlopsMethod, ...]:
    """The formulas for a setup whose defaults are filled in; none for a model of another kind."""
    try:
        shape = formula_shape(model)
    except UnsupportedOperationError:
        return ()
    return (*_by_shape(model, setup, shape), *_by_parameters(model, setup, shape))


def _by_shape(
    model: ModelSpec, setup: TrainingSetup, shape: FormulaShape
) -> tuple[FlopsMethod, ...]:
    """Formulas that add up the layers' products."""
    seq_len, batch = setup.seq_len or 1, setup.micro_batch_size
    narayanan = narayanan_flops(
        num_layers=model.num_layers, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size,
        seq_len=seq_len, batch_size=batch, recomputed_share=recomputed_share(setup, model.num_layers),
    )  # fmt: skip
    return (
        FlopsMethod(
            name="Megatron-LM", flops=megatron_flops(shape, seq_len=seq_len, batch_size=batch),
            equation="3 x (layers + 2ThV)", scores="half", source="training.py:802, d98e8a64",
        ),
        FlopsMethod(
            name="Narayanan et al.", flops=narayanan, recomputes=True,
            equation="(3+g)24bsh²L(1+s/6h)+6bshV", scores="all", source="arXiv:2104.04473",
        ),
    )  # fmt: skip


def _by_parameters(
    model: ModelSpec, setup: TrainingSetup, shape: FormulaShape
) -> tuple[FlopsMethod, ...]:
    """Formulas that multiply parameters by tokens, most with a term for the scores."""
    tape = record_model(model, TapeOptions())
    params, active = total_parameters(tape), active_parameters(tape)
    embeddings = component_parameters(tape)["embeddings"]
    seq_len, layers = setup.seq_len or 1, model.num_layers
    tokens = setup.micro_batch_size * seq_len
    palm = palm_flops(
        params, tokens=tokens, seq_len=seq_len, num_layers=layers, num_heads=shape.num_heads,
        head_dim=shape.head_dim,
    )  # fmt: skip
    torchtitan = torchtitan_flops(
        active, embedding_params=0 if model.head.tied else embeddings, tokens=tokens,
        seq_len=seq_len, shape=shape,
    )  # fmt: skip
    foundry = llm_foundry_flops(
        params, tokens=tokens, seq_len=seq_len, num_layers=layers, hidden_size=shape.hidden_size
    )
    return (
        FlopsMethod(
            name="PaLM", flops=palm, equation="T(6N + 12Lads)", scores="all",
            source="arXiv:2204.02311, appendix B",
        ),
        FlopsMethod(
            name="torchtitan", flops=torchtitan, scores="all",
            equation="T(6(N - N_emb) + 6La(d_qk + d_v)s)", source="get_nparams_and_flops, 0.3.0",
        ),
        FlopsMethod(
            name="llm-foundry", flops=foundry, equation="3T(2N + 4Lhs)", scores="all",
            source="scripts/train/benchmarking",
        ),
        *_without_scores(params, active - embeddings, tokens),
    )  # fmt: skip


def _without_scores(params: int, active: int, tokens: int) -> tuple[FlopsMethod, ...]:
    """Six FLOPs for each parameter and token: of all, and of those that a token meets without the embeddings."""
    return (
        FlopsMethod(
            name="6N, all parameters", flops=kaplan_flops(params, tokens=tokens), equation="6NT",
            scores="none", source="arXiv:2001.08361",
        ),
        FlopsMethod(
            name="6N, no embeddings, active", flops=kaplan_flops(active, tokens=tokens),
            equation="6(N_active - N_emb)T", scores="none", source="arXiv:2001.08361, table 1",
        ),
    )  # fmt: skip


def recomputed_share(setup: TrainingSetup, num_layers: int) -> float:
    """The share of layers whose whole forward pass runs twice."""
    value = setup.checkpointing
    if isinstance(value, float):
        return value
    if isinstance(value, CheckpointedLayers):
        return value.share(num_layers)
    return 1.0 if value is Recomputation.FULL else 0.0


def global_micro_batches(setup: TrainingSetup) -> int:
    """Micro-batches of one optimizer step over all ranks."""
    return setup.gradient_accumulation_steps * setup.data_parallel


def flops_rows(
    flops: StepFlops, methods: Sequence[FlopsMethod], setup: TrainingSetup
) -> list[dict[str, object]]:
    """Flat rows: each component, the totals, then each published formula."""
    rows: list[dict[str, object]] = [
        _row(each.component.value, each.forward, each.backward, each.recomputation)
        for each in flops.components
    ]
    rows.append(_row("total", flops.forward, flops.backward, flops.recomputation))
    steps = global_micro_batches(setup)
    for row in rows:
        row["step_flops"] = steps * int(str(row["flops"]))
        row["scores"] = flops.scores.value
        row["source"] = "memplan"
    for method in methods:
        row = _row(method.name, None, None, None)
        row["flops"], row["step_flops"] = method.flops, steps * method.flops
        row["scores"], row["source"] = method.scores, method.source
        rows.append(row)
    return rows


def _row(
    name: str, forward: int | None, backward: int | None, recomputation: int | None
) -> dict[str, object]:
    return {
        "name": name,
        "forward_flops": forward,
        "backward_flops": backward,
        "recomputation_flops": recomputation,
        "flops": (forward or 0) + (backward or 0) + (recomputation or 0),
    }


def write_flops(
    rows: Sequence[dict[str, object]], output_format: str, assumptions: Sequence[str]
) -> str:
    """Rows as JSON, CSV or Markdown."""
    if output_format == "json":
        return rows_json(rows, schema_version=FLOPS_SCHEMA_VERSION, assumptions=assumptions)
    return rows_csv(rows) if output_format == "csv" else rows_markdown(rows)


def flops_assumptions(model: ModelSpec, setup: TrainingSetup, flops: StepFlops) -> tuple[str, ...]:
    """What the figures are of."""
    steps = global_micro_batches(setup)
    return (
        *model.assumptions,
        f"one micro-batch of {setup.micro_batch_size} x {setup.seq_len:,} tokens",
        f"{steps} of them in a step over all ranks" if steps > 1 else "one in a step",
        f"attention scores: {CONVENTIONS[flops.scores]}",
        f"attention {setup.chosen_kernels.attention.value}",
        *(
            [f"kernels {setup.kernels.value}"]
            if isinstance(setup.kernels, KernelPreset) and setup.kernels is not KernelPreset.HF
            else []
        ),
        f"checkpointing {checkpointing_text(setup.checkpointing)}",
    )


def print_flops(
    console: "Console",
    model: ModelSpec,
    setup: TrainingSetup,
    flops: StepFlops,
    methods: Sequence[FlopsMethod],
) -> None:
    """Print the components, then the published formulas."""
    from rich.text import Text

    params = total_parameters(record_model(model, TapeOptions()))
    head = f" ({model.task.value}), {format_count(params)} parameters"
    console.print(f"{flops.total / TERA:,.2f} TFLOP a micro-batch, {_a_token(flops)}")
    console.print(Text.assemble((model.name, "bold"), head))
    print_assumptions(console, model.assumptions, flops_assumptions(model, setup, flops))
    print_table(console, component_table(flops))
    print_table(console, method_table(flops, methods))
    for line in flops_footnotes(model, setup, flops):
        console.print(Text(line, style="dim"))


def _a_token(flops: StepFlops) -> str:
    each = f"{flops.total / flops.num_tokens / GIGA:,.2f} GFLOP a token"
    if not flops.recomputation:
        return each
    return f"{each} ({flops.model / flops.num_tokens / GIGA:,.2f} without what is recomputed)"


def component_table(flops: StepFlops) -> "Table":
    """Components down, passes across."""
    table = _table()
    table.add_column("TFLOP of one micro-batch", no_wrap=True)
    names = ("forward", "backward", "recomputed", "total", "share")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for each in flops.components:
        table.add_row(
            each.component.value, *_cells(each.forward, each.backward, each.recomputation),
            f"{each.total / flops.total:.1%}",
        )  # fmt: skip
    table.add_section()
    cells = _cells(flops.forward, flops.backward, flops.recomputation)
    table.add_row("total", *cells, "", style="bold")
    return table


def method_table(flops: StepFlops, methods: Sequence[FlopsMethod]) -> "Table":
    """memplan's figure, then the published ones."""
    table = _table()
    table.add_column("method", no_wrap=True)
    for name in ("TFLOP", "GFLOP/token", "of memplan's"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("scores", no_wrap=True)
    table.add_column("equation and source", overflow="fold")
    counted = "all" if flops.scores is ScoreCount.FULL else "unmasked"
    table.add_row(
        "memplan, the tape", *_method_cells(flops.model, flops.model, flops.num_tokens), counted,
        "forward and backward of every product",
    )  # fmt: skip
    for each in methods:
        whole = flops.total if each.recomputes else flops.model
        table.add_row(
            each.name, *_method_cells(each.flops, whole, flops.num_tokens), each.scores,
            f"{each.equation}; {each.source}",
        )  # fmt: skip
    return table


def flops_footnotes(model: ModelSpec, setup: TrainingSetup, flops: StepFlops) -> tuple[str, ...]:
    """The convention, what the GPU really runs, and where formulas do not fit the model."""
    steps = global_micro_batches(setup)
    other = ScoreCount.CAUSAL if flops.scores is ScoreCount.FULL else ScoreCount.FULL
    convention = (
        f"TFLOP = 10^12; a multiply-add counts as 2. Scores: {CONVENTIONS[flops.scores]} "
        f"(--scores {other.value}: {CONVENTIONS[other]})."
    )
    lines = [convention]
    reasons = []
    if flops.early_stopped:
        reasons.append(f"torch stops recomputing early (-{flops.early_stopped / TERA:,.2f})")
    if flops.kernel_recomputation:
        again = f"(+{flops.kernel_recomputation / TERA:,.2f})"
        reasons.append(f"attention kernels compute scores again in backward {again}")
    if reasons:
        lines.append(f"The GPU runs {flops.executed / TERA:,.2f} TFLOP: {', '.join(reasons)}.")
    if steps > 1:
        lines.append(
            f"A step of {steps} micro-batches: {steps * flops.total / TERA:,.2f} TFLOP over all GPUs."
        )
    if flops.left_out:
        lines.append(f"Not counted: {flops.left_out}, whose operations are not written down.")
    letters = layer_letters(model)
    if letters:
        lines.append(letters)
    lines += [f"In the formulas, {note}." for note in shape_notes(model)]
    return tuple(lines)


def layer_letters(model: ModelSpec) -> str:
    """A layer's products in letters, for a decoder of equal layers; nothing for another model."""
    try:
        shape = formula_shape(model)
    except UnsupportedOperationError:
        return ""
    if len(model.stacks) > 1:
        return ""
    parts = ", ".join(f"{name} {letters}" for name, letters in layer_flops_letters(shape))
    return f"A layer forward, in letters (backward twice as much): {parts}."


def _cells(forward: int, backward: int, recomputation: int) -> list[str]:
    figures = (forward, backward, recomputation, forward + backward + recomputation)
    return [f"{figure / TERA:,.3f}" if figure else "-" for figure in figures]


def _method_cells(flops: int, whole: int, tokens: int) -> list[str]:
    return [f"{flops / TERA:,.2f}", f"{flops / tokens / 1e9:,.2f}", f"{flops / whole:.1%}"]


def _table() -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
