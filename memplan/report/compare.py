"""Every method side by side: what each counts, with its numbers put in, and what it leaves out.

This is where two calculators that disagree are seen to answer different questions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.errors import SetupError, UnsupportedOperationError
from memplan.estimator import Estimate, estimate
from memplan.fast_dataclass import dataclass
from memplan.formulas.activations import (
    layer_activation_bytes,
    layer_elements_bytes,
    layer_parts,
    masked_scores_bytes,
    square_root_bytes,
)
from memplan.formulas.article import gpu_memory_required
from memplan.formulas.deepspeed import (
    DeepSpeedFormula,
    DeepSpeedOffload,
    zero2_gpu_bytes,
    zero3_gpu_bytes,
)
from memplan.formulas.flops import FormulaShape
from memplan.formulas.megatron import (
    MegatronLayout,
    activation_bytes,
    shard_parameters,
    state_bytes,
)
from memplan.formulas.parameters import (
    gpt_parameters,
    llama_feed_forward_size,
    llama_parameters,
)
from memplan.formulas.states import (
    FP32_STATES,
    MIXED_STATES,
    table_bytes,
    zero_state_bytes,
    zero_state_equation,
)
from memplan.graph.counts import ParameterCounts, count_parameters
from memplan.memory.account import Lifetime
from memplan.model.norms import NormKind
from memplan.model.spec import ModelSpec
from memplan.report.narrow import print_table
from memplan.report.rows import rows_csv, rows_json, rows_markdown
from memplan.report.shape import common_layer, formula_shape, shape_notes
from memplan.training.choices import Recomputation
from memplan.training.optimizers.script import Stepped, TensorRole
from memplan.training.optimizers.script import state_bytes as optimizer_bytes
from memplan.training.optimizers.table import chosen
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup
from memplan.units import GB, GIB, format_count, format_gib

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.console import Console

COMPARE_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""

NO_ACTIVATIONS = "activations, logits, buffers, gathered parameters"
TEXTBOOK_LAYER = (
    "logits, temporaries, kernels other than Megatron's, grouped queries, gated networks"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodRow:
    """One method's figures for one GPU."""

    method: str
    setting: str
    """The stage or variant that the row is of."""
    states_bytes: int | None
    """Parameters, gradients, optimizer; None where the method does not count them."""
    activations_bytes: int | None
    """Kept from forward to backward; None where the method does not count them."""
    total_bytes: int
    """What the method would have you buy."""
    formula: str
    """In letters; ``numbers_of`` has their values."""
    source: str
    leaves_out: str


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
    case = _Case(model, setup.resolve(model.context_length), count_parameters(model))
    shape = known_shape(model)
    rows = [*_deepspeed_rows(case), *_rule_rows(case), *_table_rows(case)]
    if shape is not None:
        rows += [
            *_activation_rows(case, shape),
            _square_root_row(case, shape),
            *_article_rows(case, shape),
            _megatron_row(case, shape),
        ]
    return tuple(rows)


def known_shape(model: ModelSpec) -> FormulaShape | None:
    """The model's sizes; None for a kind of model that the formulas are not about."""
    try:
        return formula_shape(model)
    except UnsupportedOperationError:
        return None


@dataclass(frozen=True, slots=True)
class _Case:
    model: ModelSpec
    setup: TrainingSetup
    counts: ParameterCounts

    @property
    def precision(self) -> int:
        """Bytes of a number as the textbooks mean it: 2 in mixed precision, 4 in fp32."""
        formats = PRECISIONS[self.setup.chosen_precision]
        return (formats.autocast or formats.compute).num_bytes

    @property
    def seq_len(self) -> int:
        return self.setup.seq_len or 1

    @property
    def batch_size(self) -> int:
        return self.setup.micro_batch_size

    @property
    def checkpointed(self) -> bool:
        return self.setup.checkpointing is Recomputation.FULL

    def layer_bytes(self, shape: FormulaShape) -> int:
        return layer_activation_bytes(
            shape.hidden_size, num_heads=shape.num_heads, seq_len=self.seq_len,
            batch_size=self.batch_size, precision=self.precision,
        )  # fmt: skip


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
    from memplan.report.changes import setup_label

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


def _deepspeed_rows(case: _Case) -> list[MethodRow]:
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


def _rule_rows(case: _Case) -> list[MethodRow]:
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


def _table_rows(case: _Case) -> list[MethodRow]:
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


def _activation_rows(case: _Case, shape: FormulaShape) -> list[MethodRow]:
    """The textbook's layer, whole, in the forms that go around, and part by part."""
    p = case.precision
    sixteen = layer_activation_bytes(
        shape.hidden_size,
        num_heads=shape.num_heads,
        seq_len=case.seq_len,
        batch_size=case.batch_size,
    )
    elements = layer_elements_bytes(
        shape.hidden_size,
        num_heads=shape.num_heads,
        seq_len=case.seq_len,
        batch_size=case.batch_size,
        precision=p,
    )
    return [
        _layer_row(case, "16-bit", sixteen, "sbh(34 + 5as/h)", "arXiv:2205.05198, equation 2"),
        _layer_row(
            case, f"p = {p}", case.layer_bytes(shape), "psbh(16 + 2/p + 2as/h + as/(ph))",
            "arXiv:2205.05198 with p bytes a number",
        ),
        _activations_row(
            TEXTBOOK, "as printed", elements // p, "(2sa + 16h)·sb",
            "a form that calculators use: for each GPU, without L and p",
            f"all layers but one, bytes of a number, dropout masks, {TEXTBOOK_LAYER}",
        ),
        _layer_row(
            case, "no masks", elements, "p(2sa + 16h)·sb", "the same for all layers, in bytes",
            f"dropout masks, {TEXTBOOK_LAYER}",
        ),
        *_part_rows(case, shape),
    ]  # fmt: skip


def _part_rows(case: _Case, shape: FormulaShape) -> list[MethodRow]:
    """The textbook's layer part by part, and a form of its scores that calculators have."""
    parts = layer_parts(
        shape.hidden_size,
        num_heads=shape.num_heads,
        seq_len=case.seq_len,
        batch_size=case.batch_size,
        precision=case.precision,
    )
    masked = masked_scores_bytes(
        num_heads=shape.num_heads, seq_len=case.seq_len, batch_size=case.batch_size
    )
    source = "arXiv:2205.05198, section 4.1, with p bytes a number"
    return [
        *(
            _layer_row(
                case, part.name, part.num_bytes, f"({part.equation})", source, "the layer's other parts"
            )
            for part in parts
        ),
        _layer_row(
            case, "masked scores", masked, "6abs²",
            "its s x s parts with a mask before the softmax: one byte more for each score",
            "all that is not s x s",
        ),
    ]  # fmt: skip


TEXTBOOK = "textbook layer"


def _layer_row(
    case: _Case, setting: str, num_bytes: int, formula: str, source: str,
    leaves_out: str = TEXTBOOK_LAYER,
) -> MethodRow:  # fmt: skip
    """All layers, each with so many bytes."""
    layers = case.model.num_layers
    return _activations_row(
        TEXTBOOK, setting, layers * num_bytes, f"L·{formula}", source, leaves_out
    )


def _square_root_row(case: _Case, shape: FormulaShape) -> MethodRow:
    layers = case.model.num_layers
    found = square_root_bytes(case.layer_bytes(shape), num_layers=layers)
    return _activations_row(
        "square-root checkpoints", "every √L-th", found, "2√L·sbh(34 + 5as/h)",
        "arXiv:1604.06174, section 4", "logits; frameworks checkpoint every layer, not every √L-th",
    )  # fmt: skip


def _activations_row(
    method: str, setting: str, num_bytes: int, formula: str, source: str, leaves_out: str
) -> MethodRow:
    return MethodRow(
        method=method, setting=setting, states_bytes=None, activations_bytes=num_bytes,
        total_bytes=num_bytes, formula=formula, source=source,
        leaves_out=f"states; {leaves_out}",
    )  # fmt: skip


def _article_rows(case: _Case, shape: FormulaShape) -> list[MethodRow]:
    rows = []
    for stage in range(4):
        total = gpu_memory_required(
            case.counts.total / 10**9, case.setup.num_gpus, case.model.num_layers, case.seq_len,
            case.batch_size, shape.hidden_size, shape.num_heads, case.precision,
            case.checkpointed, stage,
        )  # fmt: skip
        states = zero_state_bytes(
            case.counts.total, num_gpus=case.setup.num_gpus, stage=stage, precision=case.precision
        )
        rows.append(
            MethodRow(
                method="rule and textbook",
                setting=f"ZeRO-{stage}",
                states_bytes=int(states),
                activations_bytes=int(total * GB - states),
                total_bytes=int(total * GB),
                formula=zero_state_equation(stage=stage, precision=case.precision)
                + (" + √A in GB" if case.checkpointed else " + A"),
                source="memplan.formulas.gpu_memory_required, A being the textbook's",
                leaves_out=TEXTBOOK_LAYER
                + ("; the root of a number of GB hangs on the unit" if case.checkpointed else ""),
            )
        )
    return rows


def _megatron_row(case: _Case, shape: FormulaShape) -> MethodRow:
    layout = _megatron_layout(case.setup)
    rms = common_layer(case.model).norm.kind in _RMS_NORMS
    params = shard_parameters(shape, tied=case.model.head.tied, rms_norm=rms, layout=layout)
    states = state_bytes(params, layout=layout)
    activations = activation_bytes(
        shape, seq_len=case.seq_len, batch_size=case.batch_size, layout=layout
    )
    rule = "(6 + 12/n)" if layout.distributed_optimizer else "18"
    if not (layout.sequence_parallel and layout.selective):
        return MethodRow(
            method="Megatron's report", setting="none",
            states_bytes=states, activations_bytes=activations, total_bytes=states + activations,
            formula=f"{rule}Φ + 1.05(L·sbh(10 + 24/t) + ...)",
            source="theoretical_memory_usage.py, d98e8a64",
            leaves_out="grouped queries, mixtures, core attention, any recomputation, temporaries",
        )  # fmt: skip
    return MethodRow(
        method="Megatron's report", setting="selective",
        states_bytes=states, activations_bytes=activations, total_bytes=states + activations,
        formula=f"{rule}Φ + L·sbh(18 + 4f/h) + 4sb(h + V)",
        source="theoretical_memory_usage.py, d98e8a64",
        leaves_out="grouped queries, mixtures, core attention, full recomputation, temporaries",
    )  # fmt: skip


def _megatron_layout(setup: TrainingSetup) -> MegatronLayout:
    """The setup's own under its engine; else what shards over all GPUs and recomputes core attention."""
    gpus = setup.num_gpus
    if setup.chosen_engine is not Engine.MEGATRON:
        return MegatronLayout(
            data_parallel=gpus, distributed_optimizer=gpus > 1,
            sequence_parallel=True, selective=True,
        )  # fmt: skip
    from memplan.memory.megatron.options import MegatronStates, layers_of  # only for its engine
    from memplan.training.megatron import RecomputeModule

    return MegatronLayout(
        tensor_parallel=setup.tensor_parallel,
        sequence_parallel=setup.sequence_parallel,
        pipeline_parallel=setup.pipeline_parallel,
        virtual_stages=setup.virtual_stages,
        expert_parallel=setup.expert_parallel,
        data_parallel=setup.data_parallel,
        distributed_optimizer=MegatronStates.of(setup).use_distributed_optimizer,
        selective=layers_of(setup).recomputes(RecomputeModule.CORE_ATTN),
        num_microbatches=setup.gradient_accumulation_steps,
    )


_RMS_NORMS = frozenset(
    {NormKind.RMS, NormKind.RMS_T5, NormKind.RMS_GEMMA}
    | {kind for kind in NormKind if kind.value.startswith("rms")}
)


def numbers_of(model: ModelSpec, setup: TrainingSetup) -> str:
    """The letters of all formulas, with their values."""
    resolved = setup.resolve(model.context_length)
    counts, shape = count_parameters(model), known_shape(model)
    case = _Case(model, resolved, counts)
    text = (
        f"Φ = {counts.total:,} parameters, Λ = {counts.largest_layer:,} in the largest module, "
        f"n = {resolved.num_gpus}, p = {case.precision} bytes, s = {case.seq_len:,} tokens, "
        f"b = {case.batch_size}"
    )
    if shape is None:
        return f"{text}; no formula for activations is about this kind of model"
    width = shape.intermediate_size or shape.expert_size
    return (
        f"{text}, h = {shape.hidden_size:,}, a = {shape.num_heads}, L = {model.num_layers}, "
        f"f = {width:,}, V = {model.vocab_size:,}"
    )


# -- writing -------------------------------------------------------------------------------------


def method_rows(rows: Sequence[MethodRow]) -> list[dict[str, object]]:
    """Flat rows; bytes are integers, None where a method does not count."""
    return [
        {
            "method": row.method,
            "setting": row.setting,
            "states_bytes": row.states_bytes,
            "activations_bytes": row.activations_bytes,
            "total_bytes": row.total_bytes,
            "formula": row.formula,
            "source": row.source,
            "leaves_out": row.leaves_out,
        }
        for row in rows
    ]


def write_methods(rows: Sequence[MethodRow], output_format: str, assumptions: Sequence[str]) -> str:
    """Rows as JSON, CSV or Markdown."""
    flat = method_rows(rows)
    if output_format == "json":
        return rows_json(flat, schema_version=COMPARE_SCHEMA_VERSION, assumptions=assumptions)
    return rows_csv(flat) if output_format == "csv" else rows_markdown(flat)


def compare_assumptions(model: ModelSpec, setup: TrainingSetup) -> tuple[str, ...]:
    """What all methods are asked about."""
    resolved = setup.resolve(model.context_length)
    return (
        *model.assumptions,
        f"{resolved.num_gpus} GPU{'s' if resolved.num_gpus > 1 else ''}"
        + (f" on {resolved.nodes} nodes" if resolved.nodes > 1 else ""),
        f"{resolved.seq_len:,} tokens",
        f"micro-batch {resolved.micro_batch_size}",
        f"precision {resolved.chosen_precision.value}",
        *(f"in the formulas, {note}" for note in shape_notes(model)),
    )


def print_methods(
    console: "Console",
    model: ModelSpec,
    setup: TrainingSetup,
    rows: Sequence[MethodRow],
    refused: Sequence[str],
) -> None:
    """Print one line of figures per method, its formula and its gaps beside them."""
    from rich.text import Text

    params = format_count(count_parameters(model).total)
    head = f" ({model.task.value}), {params} parameters"
    if answer := answer_words(rows):
        console.print(Text(answer))
    console.print(Text.assemble((model.name, "bold"), head))
    asked = ", ".join(compare_assumptions(model, setup))
    console.print(Text(f"All are asked about: {asked}", style="dim"))
    console.print(Text(numbers_of(model, setup), style="dim"))
    notes = _notes(rows)
    print_table(console, _method_table(rows, notes), num_labels=2)
    for text, number in notes.items():
        console.print(Text(f"[{number}] {text}", style="dim"))
    for line in (
        *parameter_lines(model),
        *_footnotes(setup),
        *(f"memplan has no row: {reason}" for reason in refused),
    ):
        console.print(Text(line, style="dim"))


OWN = "memplan"
"""How the names of its own methods begin."""
NEAR = 0.1
"""How far from memplan's figure a formula's may be to be called near."""


def answer_words(rows: Sequence[MethodRow]) -> str:
    """What memplan says, and how many of the formulas come near it."""
    own = [row for row in rows if row.method.startswith(OWN)]
    whole = [row.total_bytes for row in rows if not row.method.startswith(OWN) and row.states_bytes]
    if not own or not whole:
        return ""
    wanted = own[0].total_bytes
    near = sum(abs(each - wanted) <= NEAR * wanted for each in whole)
    return (
        f"memplan: {format_gib(wanted)} ({own[0].setting}); of {len(whole)} published formulas {near} "
        f"within {NEAR:.0%} of it, {format_gib(min(whole), digits=1)} to {format_gib(max(whole), digits=1)}"
    )


def _notes(rows: Sequence[MethodRow]) -> dict[str, int]:
    """Source and gaps of every row, each once, numbered in the order they are met."""
    notes: dict[str, int] = {}
    for row in rows:
        notes.setdefault(_note(row), len(notes) + 1)
    return notes


def _note(row: MethodRow) -> str:
    return f"{row.source}. Left out: {row.leaves_out}."


def _method_table(rows: Sequence[MethodRow], notes: dict[str, int]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    table.add_column("of", no_wrap=True)
    for name in ("states", "activations", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("GiB by this formula", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        figures = (row.states_bytes, row.activations_bytes, row.total_bytes)
        table.add_row(
            row.method if row.method != previous else "", row.setting,
            *(_gib(figure) for figure in figures), row.formula, f"[{notes[_note(row)]}]",
            style="bold" if row.method.startswith("memplan") else None,
        )  # fmt: skip
        previous = row.method
    return table


def parameter_lines(model: ModelSpec) -> tuple[str, ...]:
    """The model's parameters in letters, beside what they are."""
    shape = known_shape(model)
    if shape is None or shape.num_experts or len(model.stacks) > 1:
        return ()
    total, h = count_parameters(model).total, shape.hidden_size
    if not shape.gated:
        found = gpt_parameters(
            num_layers=model.num_layers, hidden_size=h, vocab_size=model.vocab_size
        )
        return (_parameters_line("12h²L + Vh", found, total),)
    found = llama_parameters(
        num_layers=model.num_layers, hidden_size=h, intermediate_size=shape.intermediate_size,
        vocab_size=model.vocab_size,
    )  # fmt: skip
    width = (
        f"LLaMA's f is 256·⌈(8h/3)/256⌉ = {llama_feed_forward_size(h):,}, about 8h/3 = "
        f"{8 * h / 3:,.0f}; this model's is {shape.intermediate_size:,}."
    )
    return _parameters_line("L(4h² + 3hf) + Vh", found, total), width


def _parameters_line(letters: str, found: int, total: int) -> str:
    return (
        f"Parameters in letters: {letters} = {found:,}, {found / total:.1%} of the model's {total:,} "
        "(biases, norms, positions, grouped keys and an output matrix of its own are not in it)."
    )


def assumed_bytes_line(setup: TrainingSetup) -> str:
    """How many bytes a parameter takes in this setup, where the methods assume another number."""
    formats = PRECISIONS[setup.chosen_precision]
    parts = {
        "weights": formats.weights.num_bytes,
        "gradients": formats.gradients.num_bytes,
        "master weights": DType.FP32.num_bytes if formats.master_weights else 0,
        "optimizer": _bytes_of_states(setup, formats.optimizer_states),
    }
    total = sum(parts.values())
    if total == sum(num_bytes for _, num_bytes in MIXED_STATES):
        return ""
    words = ", ".join(f"{name} {num_bytes}" for name, num_bytes in parts.items() if num_bytes)
    return (
        f"The methods assume 16 bytes a parameter or more; {setup.chosen_precision.value} with "
        f"{setup.optimizer.value} holds {total}: {words}."
    )


def _bytes_of_states(setup: TrainingSetup, dtype: DType) -> int:
    """The optimizer's states of one element of a large matrix, wherever they are [bytes]."""
    row, options = chosen(setup.optimizer, setup.optimizer_options)
    matrix = Stepped((4096, 4096), dtype, TensorRole.LINEAR, "mlp.up_proj")
    return optimizer_bytes(row, options, matrix) // matrix.numel


def _footnotes(setup: TrainingSetup) -> tuple[str, ...]:
    assumed = assumed_bytes_line(setup)
    units = (
        "GiB = 2^30 bytes. memplan's last figure is the peak of a step: its states and activations "
        "need not all be alive at that moment, and temporaries are."
    )
    return (assumed, units) if assumed else (units,)


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:,.2f}"
