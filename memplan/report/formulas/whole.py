"""Published formulas of both together."""

from memplan.formulas.article import gpu_memory_required
from memplan.formulas.flops import FormulaShape
from memplan.formulas.megatron import (
    MegatronLayout,
    activation_bytes,
    shard_parameters,
    state_bytes,
)
from memplan.formulas.states import (
    zero_state_bytes,
    zero_state_equation,
)
from memplan.model.norms import NormKind
from memplan.report.formulas.case import TEXTBOOK_LAYER, Case, MethodRow
from memplan.report.shape import common_layer
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.units import GB


def article_rows(case: Case, shape: FormulaShape) -> list[MethodRow]:
    """The rule and the textbook layer added."""
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


def megatron_row(case: Case, shape: FormulaShape) -> MethodRow:
    """Megatron-LM's theoretical report."""
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
    from memplan.training.splitting.megatron import RecomputeModule

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
