"""The table of optimizers: what each keeps, by shape and format, and what its step takes."""

from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.sources.models import load_model
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import (
    Act,
    ActKind,
    OptimizerRow,
    Script,
    Stepped,
    TensorRole,
    acts_of,
    options_of,
    states_of,
)
from memplan.training.optimizers.spellings import (
    DEEPSPEED,
    OTHERS,
    TRANSFORMERS,
    UNMODELLED,
)
from memplan.training.optimizers.table import all_rows, chosen, row_of
from memplan.training.setup import TrainingSetup

MATRIX = Stepped((8192, 2048), DType.BF16, TensorRole.LINEAR, "mlp.up_proj")
VECTOR = Stepped((2048,), DType.BF16)
GPU = (ActKind.STATE, ActKind.SHARED, ActKind.COUNTER)


def kept(optimizer: Optimizer, tensor: Stepped, **given: object) -> dict[str, int]:
    """An optimizer's states of one tensor on the GPU [bytes]."""
    row, options = chosen(optimizer, tuple(given.items()))
    return {act.name: act.num_bytes for act in states_of(row, options, tensor) if act.kind in GPU}


def most(acts: tuple[Act, ...]) -> int:
    """The most that the local variables of one update hold at once [bytes]."""
    held: dict[str, int] = {}
    highest = 0
    for act in acts:
        if act.kind is ActKind.LET:
            highest = max(highest, sum(held.values()) + act.num_bytes)
            held[act.name] = act.num_bytes
        elif act.kind is ActKind.DROP:
            held.pop(act.name, None)
        elif act.kind is ActKind.RENAME:
            name, _, new = act.name.partition(">")
            held[new] = held.pop(name)
        highest = max(highest, sum(held.values()))
    return highest


P = 8192 * 2048


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        pytest.param(Optimizer.ADAMW_FUSED, {"step": 4, "exp_avg": 2 * P, "exp_avg_sq": 2 * P}),
        pytest.param(Optimizer.ADAMW_FOREACH, {"exp_avg": 2 * P, "exp_avg_sq": 2 * P}),
        pytest.param(Optimizer.SGD, {}),
        pytest.param(Optimizer.SGD_MOMENTUM, {"momentum_buffer": 2 * P}),
        pytest.param(Optimizer.ADAFACTOR_LOOP, {"row_var": 2 * 8192, "col_var": 2 * 2048}),
        pytest.param(
            Optimizer.ADAFACTOR,
            {"exp_avg_sq_row": 4 * 8192, "exp_avg_sq_col": 4 * 2048, "RMS": 4},
        ),
        pytest.param(Optimizer.MUON, {"momentum_buffer": 2 * P}),
        pytest.param(Optimizer.BNB_ADAMW, {"state1": 4 * P, "state2": 4 * P}),
        pytest.param(
            Optimizer.BNB_ADAMW_8BIT,
            {
                "qmap1": 1024, "qmap2": 1024, "state1": P, "state2": P,
                "absmax1": 4 * P // 256, "absmax2": 4 * P // 256,
            },
        ),
        pytest.param(
            Optimizer.BNB_PAGED_ADAMW_8BIT,
            {"qmap1": 1024, "qmap2": 1024, "absmax1": 4 * P // 256, "absmax2": 4 * P // 256},
        ),
        pytest.param(
            Optimizer.BNB_ADEMAMIX_8BIT,
            {
                "qmap1": 1024, "qmap2": 1024, "state1": 2 * P, "state2": P,
                "absmax1": 8 * P // 256, "absmax2": 4 * P // 256,
            },
        ),
        pytest.param(
            Optimizer.TORCHAO_ADAMW_4BIT,
            {
                f"{name}.{part}": size
                for name in ("exp_avg", "exp_avg_sq")
                for part, size in (("codes", P // 2), ("scale", 4 * P // 128), ("qmap", 64))
            },
        ),
        pytest.param(Optimizer.TORCHAO_CPU_OFFLOAD, {}),
        pytest.param(
            Optimizer.GALORE_ADAMW,
            {
                "projector.ortho_matrix": 2 * 128 * 2048,
                "exp_avg": 2 * 8192 * 128, "exp_avg_sq": 2 * 8192 * 128,
            },
        ),
        pytest.param(Optimizer.LOMO, {}),
        pytest.param(Optimizer.ADALOMO, {"exp_avg_sq_row": 4 * 8192, "exp_avg_sq_col": 4 * 2048}),
        pytest.param(Optimizer.SCHEDULE_FREE_SGD, {"z": 2 * P}),
        pytest.param(Optimizer.ADAM_MINI, {"m": 2 * P, "vmean": 2 * 8192}),
        pytest.param(  # optimi's: a 16-bit weight has what rounding took away
            Optimizer.STABLE_ADAMW,
            {"exp_avg": 2 * P, "exp_avg_sq": 2 * P, "eps_sq": 2, "kahan_comp": 2 * P, "mean_square": 4},
        ),
    ],
    ids=lambda value: value.value if isinstance(value, Optimizer) else "",
)  # fmt: skip
def test_what_each_keeps_of_a_matrix(optimizer: Optimizer, states: dict[str, int]) -> None:
    assert kept(optimizer, MATRIX) == states


@pytest.mark.parametrize(
    ("optimizer", "copies", "dtype"),
    [
        pytest.param(Optimizer.ADAMW_FUSED, 0, DType.BF16),
        pytest.param(Optimizer.ADAMW_LOOP, 2, DType.BF16),
        pytest.param(Optimizer.ADAFACTOR_LOOP, 1, DType.BF16),
        pytest.param(Optimizer.ADAFACTOR, 4, DType.FP32),
        pytest.param(Optimizer.CAME, 4, DType.FP32),
        pytest.param(Optimizer.BNB_ADAMW_8BIT, 0, DType.FP32),
        pytest.param(Optimizer.TORCHAO_ADAMW_8BIT, 2, DType.FP32),
        pytest.param(Optimizer.TORCHAO_ADAMW_4BIT, 6, DType.FP32),
        pytest.param(Optimizer.MUON, 3, DType.BF16),
    ],
    ids=lambda value: value.value if isinstance(value, Optimizer) else "",
)
def test_copies_of_one_tensor_in_a_later_step(
    optimizer: Optimizer, copies: int, dtype: DType
) -> None:
    row, options = chosen(optimizer, ())
    acts = acts_of(row, options, MATRIX, init=False, update=True, first=False)
    whole = MATRIX.numel * dtype.num_bytes
    small = 2 * 2 * 2048**2 if optimizer is Optimizer.MUON else whole // 16
    assert copies * whole <= most(acts) <= copies * whole + small


@pytest.mark.parametrize("tensor", [MATRIX, VECTOR], ids=["matrix", "vector"])
def test_states_come_with_the_first_step(tensor: Stepped) -> None:
    """A later one makes none: at most it binds one to another tensor."""
    for optimizer in Optimizer:
        row, options = chosen(optimizer, ())
        acts = acts_of(row, options, tensor, init=False, update=True, first=False)
        assert {act.kind for act in acts}.isdisjoint({*GPU, ActKind.MANAGED, ActKind.HOST}), (
            optimizer
        )


def test_every_optimizer_has_a_row_with_a_source() -> None:
    assert set(all_rows()) == set(Optimizer)
    assert all(row.source for row in all_rows().values())


FACTORED = {"adafactor", "adafactor-foreach", "adafactor-loop", "came", "adalomo"}
"""Have a second moment for each row and column of a matrix, and a whole one of a vector, such as a flat shard."""


def test_what_needs_matrices_does_something_else_with_what_is_cut_from_them() -> None:
    """Of all others a vector of as many elements is the same, but for those that know a form for it."""
    flat, differ = Stepped((MATRIX.numel,), MATRIX.dtype, MATRIX.role, MATRIX.module), set()
    for optimizer, row in all_rows().items():
        options, has_own = options_of(row, {}, optimizer.value), row.update_all is None
        ways = [
            [
                acts_of(row, options, each, init=True, update=has_own, first=first)
                for first in (True, False)
            ]
            for each in (MATRIX, flat)
        ]
        if ways[0] != ways[1]:
            differ.add(optimizer.value)
    needing = {each.value for each, row in all_rows().items() if row.needs_matrices}
    assert differ - needing == FACTORED
    assert needing <= differ


def test_a_flat_shard_is_a_vector() -> None:
    flat = Stepped((P,), DType.FP32)
    assert kept(Optimizer.ADAFACTOR_LOOP, flat) == {"variance": 4 * P}
    assert kept(Optimizer.MUON, flat) == {"step": 4, "exp_avg": 4 * P, "exp_avg_sq": 4 * P}


def test_stacked_experts_are_factored_one_by_one() -> None:
    experts = Stepped((8, 64, 32), DType.FP32)
    assert kept(Optimizer.ADAFACTOR_LOOP, experts) == {"row_var": 4 * 512, "col_var": 4 * 256}


def test_muon_leaves_embeddings_and_the_head_to_adamw() -> None:
    for role in (TensorRole.EMBEDDING, TensorRole.HEAD):
        table = Stepped((64, 32), DType.BF16, role)
        assert set(kept(Optimizer.MUON, table)) == {"step", "exp_avg", "exp_avg_sq"}
    head = Stepped((64, 32), DType.BF16, TensorRole.HEAD)
    assert set(kept(Optimizer.MUON, head, head="muon")) == {"momentum_buffer"}


def test_small_tensors_have_32_bit_states() -> None:
    assert kept(Optimizer.BNB_ADAMW_8BIT, VECTOR) == {"state1": 4 * 2048, "state2": 4 * 2048}
    assert set(kept(Optimizer.BNB_ADAMW_8BIT, VECTOR, min_8bit_size=1024)) >= {"absmax1"}
    table = Stepped((8192, 2048), DType.BF16, TensorRole.EMBEDDING)
    assert "absmax1" in kept(Optimizer.BNB_ADAMW_8BIT, table)
    assert "absmax1" not in kept(Optimizer.BNB_ADAMW_8BIT, table, embeddings_32bit=True)


def test_adding_an_optimizer_is_adding_a_row() -> None:
    def init(script: Script, tensor: Stepped) -> None:
        if tensor.is_factored:
            script.state("half", tensor.numel // 2, DType.FP32)

    row = OptimizerRow(init=init, source="a test")
    found = states_of(row, (), Stepped((4, 4), DType.BF16))
    assert [(act.name, act.num_bytes) for act in found] == [("half", 32)]


def test_options_that_do_not_exist_are_refused_with_the_nearest() -> None:
    with pytest.raises(SetupError, match="galore-adamw has no option 'rnak'; Did you mean 'rank'"):
        TrainingSetup(optimizer="galore-adamw", optimizer_options={"rnak": 8})  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="rank: write a whole number from 1"):
        TrainingSetup(optimizer="galore-adamw", optimizer_options={"rank": "many"})  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="adamw-fused has no option 'rank'"):
        TrainingSetup(optimizer_options={"rank": 8})
    assert dict(options_of(row_of(Optimizer.SGD), {"momentum": 1}, "sgd"))["momentum"] == 1.0


@pytest.mark.parametrize("name", sorted([*TRANSFORMERS, *OTHERS]))
def test_names_of_transformers_are_known(name: str) -> None:
    setup = TrainingSetup(optimizer=name)  # type: ignore[arg-type]
    spelling = TRANSFORMERS.get(name) or OTHERS[name]
    assert setup.optimizer is spelling.optimizer
    assert setup.optimizer_in_backward is spelling.in_backward
    assert dict(setup.optimizer_options) == dict(spelling.options)


@pytest.mark.parametrize("name", sorted(UNMODELLED))
def test_names_that_no_gpu_runs_are_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(SetupError, match=f"optimizer: {name}: .*nearest"):
        TrainingSetup(optimizer=name)  # type: ignore[arg-type]


def test_deepspeed_names_are_in_lower_case() -> None:
    assert all(name == name.lower() for name in DEEPSPEED)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        pytest.param(
            {"optimizer": "muon", "num_gpus": 8, "engine": "deepspeed", "zero_stage": 2},
            "steps whole matrices, and ZeRO hands it flat shards",
            id="muon on flat shards",
        ),
        pytest.param(
            {"optimizer": "galore_adamw", "num_gpus": 8, "engine": "fsdp"},
            "fsdp hands it a part of each matrix",
            id="galore on DTensors",
        ),
        pytest.param(
            {"optimizer": "lomo", "num_gpus": 8}, "on one GPU without an engine", id="lomo"
        ),
        pytest.param(
            {"optimizer_in_backward": True, "gradient_accumulation_steps": 4},
            "set gradient_accumulation_steps to 1",
            id="accumulation",
        ),
        pytest.param(
            {"optimizer_in_backward": True, "num_gpus": 8, "engine": "ddp"},
            "reduce gradients in buckets",
            id="in backward under DDP",
        ),
        pytest.param(
            {"optimizer": "bnb-lion-8bit", "num_gpus": 8, "offload_optimizer": "cpu"},
            "has no form for the CPU",
            id="offloaded bitsandbytes",
        ),
    ],
)
def test_what_an_engine_cannot_run_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        TrainingSetup(**fields)  # type: ignore[arg-type]


def test_weights_that_deepspeed_offloads_leave_the_step_on_the_gpu() -> None:
    """FSDP's states lie where its weights do (deepspeed 0.19.8, runtime/zero/stage3.py: ``self.device``)."""
    fields: dict[str, Any] = {"optimizer": "bnb-adamw-8bit", "num_gpus": 8, "offload_param": "cpu"}
    own = estimate(
        load_model("gpt2"), TrainingSetup(engine="deepspeed", zero_stage=3, **fields), None
    )  # type: ignore[arg-type]
    assert own.phases["step"].components["optimizer_states"] > 0
    with pytest.raises(SetupError, match="no form for the CPU"):
        TrainingSetup(engine="fsdp", **fields)  # type: ignore[arg-type]
    fields["optimizer"] = "torchao-adamw-4bit"  # steps where its parameters lie
    offloaded = TrainingSetup(engine="fsdp", offload_optimizer="cpu", **fields)  # type: ignore[arg-type]
    found = estimate(load_model("gpt2"), offloaded, None)
    assert "optimizer_states" not in found.phases["step"].components


def test_the_answer_names_an_optimizer_s_settings() -> None:
    model = load_model("gpt2")
    setup = TrainingSetup(
        engine="ddp", optimizer="galore_adamw_layerwise", optimizer_options={"rank": 64}
    )  # type: ignore[arg-type]
    found = estimate(model, setup, None)
    assert "optimizer galore-adamw (rank 64) within backward" in found.assumptions
    assert "rank=64; optimizer_in_backward=True" in str(found.to_dict()["other_settings"])


def test_paged_and_offloaded_states_are_in_cpu_ram() -> None:
    model = load_model("gpt2")
    plain = estimate(model, TrainingSetup(engine="ddp", optimizer="bnb-adamw"), None)  # type: ignore[arg-type]
    paged = estimate(model, TrainingSetup(engine="ddp", optimizer="bnb-paged-adamw"), None)  # type: ignore[arg-type]
    moved = plain.held_bytes - paged.held_bytes
    assert moved > 8 * 124_000_000
    assert paged.host_bytes >= moved * 0.999


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp", "fsdp1"])
@pytest.mark.parametrize("optimizer", ["bnb-adamw-8bit", "adafactor-loop", "lion", "came"])
def test_shards_are_stepped_under_every_engine(engine: str, optimizer: str) -> None:
    model = load_model("gpt2")
    own = estimate(model, TrainingSetup(num_gpus=8, engine=engine, optimizer=optimizer), None)  # type: ignore[arg-type]
    adamw = estimate(model, TrainingSetup(num_gpus=8, engine=engine), None)  # type: ignore[arg-type]
    states = "optimizer_states"
    # Of a flat shard CAME's second moment is whole, and it keeps no residual's.
    assert 0 < own.phases["step"].components[states] <= adamw.phases["step"].components[states]


def test_stepping_in_backward_never_holds_all_gradients() -> None:
    model = load_model("gpt2")
    fields = {"engine": "ddp", "precision": "bf16", "checkpointing": "full", "seq_len": 128}
    whole = estimate(model, TrainingSetup(**fields), None)  # type: ignore[arg-type]
    parts = estimate(model, TrainingSetup(optimizer_in_backward=True, **fields), None)  # type: ignore[arg-type]
    gradients = "gradients"
    largest = 2 * 50257 * 768
    assert whole.phases["step"].components[gradients] > 2 * 124_000_000
    assert gradients not in parts.phases["step"].components
    assert parts.phases["backward"].components[gradients] < 1.1 * largest
    assert parts.held_bytes == whole.held_bytes


@pytest.mark.parametrize("optimizer", ["galore-adamw", "apollo-adamw"])
def test_what_looks_for_linear_layers_finds_none_in_gpt2(optimizer: str) -> None:
    """GPT-2's are transformers' ``Conv1D``: every state is as large as its weight, as without targets."""
    fields: dict[str, object] = {"engine": "ddp", "optimizer": optimizer, "precision": "bf16"}
    model = load_model("gpt2")
    found = estimate(model, TrainingSetup(**fields), None)  # type: ignore[arg-type]
    whole = TrainingSetup(optimizer_options={"target_modules": "none"}, **fields)  # type: ignore[arg-type]
    assert found.held_bytes == estimate(model, whole, None).held_bytes
    assert any("finds none in the layers of gpt2" in each for each in found.assumptions)
    other = estimate(load_model("llama-3.2-1b"), TrainingSetup(**fields), None)  # type: ignore[arg-type]
    assert not any("finds none" in each for each in other.assumptions)


def test_targets_that_no_layer_is_called_by_are_refused() -> None:
    setup = TrainingSetup(
        engine="ddp",  # type: ignore[arg-type]
        optimizer="galore-adamw",  # type: ignore[arg-type]
        optimizer_options={"target_modules": "c_atn"},
    )
    with pytest.raises(SetupError, match=r"no linear layer's name has c_atn; there are attn"):
        estimate(load_model("gpt2"), setup, None)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_states_that_a_tensor_has_are_in_the_account(optimizer: Optimizer) -> None:
    """A row may make them in its update or before; either way a step plays them."""
    setup = TrainingSetup(precision="bf16", seq_len=8, optimizer=optimizer)
    try:
        found = estimate(load_model("smollm2-135m"), setup)
    except SetupError:
        return
    states = found.phases["step"].components.get("optimizer_states", 0)
    assert states > 0 or not any(kept(optimizer, MATRIX).values()), optimizer
