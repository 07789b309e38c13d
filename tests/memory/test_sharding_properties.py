"""What must hold for FSDP2, FSDP1 and DDP whatever the setup."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.dtypes import DType
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, allocated_bytes
from memplan.memory.account import RankAccount
from memplan.memory.fsdp1.units import FlatUnit, own_states
from memplan.memory.fsdp1.wrapping import wrap
from memplan.memory.fsdp2.units import num_spread, places_alike
from memplan.memory.fsdp2.units import own_states as own_shards
from memplan.memory.programs import program_of
from memplan.memory.programs.fully_sharded.program import Fsdp2Program
from memplan.memory.replaying.ledger import Ledger
from memplan.training.setup import TrainingSetup
from tests.accuracy.sharding_records import account_of
from tests.memory.deepspeed.small_model import given_for

SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 704, "vocab_size": 1000, "num_hidden_layers": 3,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
NUM_TENSORS = 9 * SMALL["num_hidden_layers"] + 3

SETUPS = st.fixed_dictionaries(
    {
        "engine": st.sampled_from(["fsdp", "fsdp1", "ddp"]),
        "num_gpus": st.sampled_from([1, 2, 3, 8, 64]),
        "micro_batch_size": st.integers(1, 3),
        "seq_len": st.sampled_from([32, 100, 512]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, 3]),
        "checkpointing": st.sampled_from(["none", "full"]),
        "precision": st.just("fp32"),
        "optimizer": st.sampled_from(["adamw-fused", "adamw-foreach", "sgd-momentum"]),
    }
)


def account(**fields: Any) -> RankAccount:
    return account_of(SMALL, TrainingSetup(**fields))


def options_for(engine: str, sync: bool) -> dict[str, object]:
    return {"sync_each_batch": sync} if engine != "ddp" else {}


ENDS_WITH_A_RANK: dict[str, Any] = {**SMALL, "hidden_size": 64, "intermediate_size": 194}
"""Half of a layer's elements are those of its norms, of its attention and of one of its network's three matrices."""


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    ("config", "num_gpus"), [(SMALL, 3), (SMALL, 8), (ENDS_WITH_A_RANK, 2)], ids=["3", "8", "2"]
)
def test_ranks_of_fsdp1_share_the_states_out(
    config: dict[str, Any], num_gpus: int, original: bool
) -> None:
    """Each rank keeps moments of what lies in its part of each flat parameter, rounded up piece by piece."""
    options = {"use_orig_params": original}
    fields: dict[str, Any] = {"num_gpus": num_gpus, "num_nodes": 1, "engine_options": options}
    wrapped = wrap(given_for(config, engine="fsdp1", zero_stage=None, **fields))
    found = {
        place: (each.state_bytes, each.num_trained)
        for each in own_states(wrapped.units, wrapped.formats)
        for place in each.places
    }
    expected = {}
    for place in range(num_gpus):
        size = count = 0
        for unit in wrapped.units.all():
            assert isinstance(unit, FlatUnit)
            own = range(place * unit.shard_numel, (place + 1) * unit.shard_numel)
            for begin, end in unit.trained:
                piece = min(end, own.stop) - max(begin, own.start)
                if piece > 0:
                    size += allocated_bytes(piece, DType.FP32) * unit.num_copies
                    count += unit.num_copies
        expected[place] = size, count
    assert found == expected


MIXTURE: dict[str, Any] = {
    **SMALL, "model_type": "qwen3_moe", "moe_intermediate_size": 104, "num_experts": 6, "num_experts_per_tok": 2,
    "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(("experts", "num_gpus"), [(1, 3), (2, 16)])
def test_ranks_of_fsdp2_are_alike_where_they_keep_the_same(experts: int, num_gpus: int) -> None:
    given = given_for(
        MIXTURE, engine="fsdp", zero_stage=None, num_gpus=num_gpus, expert_parallel=experts
    )
    program = program_of(given, Ledger(), workspace_bytes=0)
    assert isinstance(program, Fsdp2Program)
    kept = [
        own_shards(program.units, program.formats, range(place, place + 1)).state_bytes
        for place in range(num_gpus)
    ]
    runs = [[kept[place] for place in run] for run in places_alike(program.units, num_gpus)]
    assert sum(map(len, runs)) == num_gpus
    assert [len(set(run)) for run in runs] == [1] * len(runs)
    # Two moments in 16 bits of each of the model's elements, each expert's once; blocks' rounding comes to them.
    whole = sum(
        4 * parameter.numel * num_spread(parameter) * unit.num_copies
        for unit in program.units.all()
        for parameter in unit.parameters
    )
    blocks = sum(len(unit.parameters) * unit.num_copies for unit in program.units.all())
    assert whole <= sum(kept) <= whole + 2 * blocks * ALLOCATION_ROUNDING * num_gpus


@given(fields=SETUPS, sync=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_peak_is_the_sum_of_its_components(fields: dict[str, Any], sync: bool) -> None:
    made = account(**fields, engine_options=options_for(fields["engine"], sync))
    for phase in made.phases:
        assert all(entry.num_bytes > 0 for entry in phase.entries)
        assert phase.peak_bytes == sum(phase.components.values())
    assert made.peak.peak_bytes >= made.held_bytes


@given(fields=SETUPS, sync=st.booleans())
@settings(max_examples=40, deadline=None)
def test_more_tokens_never_lower_a_peak(fields: dict[str, Any], sync: bool) -> None:
    options = options_for(fields["engine"], sync)
    before = account(**fields, engine_options=options)
    for name in ("micro_batch_size", "seq_len"):
        after = account(**{**fields, name: 2 * fields[name]}, engine_options=options)
        for one, other in zip(before.phases, after.phases, strict=True):
            assert other.peak_bytes >= one.peak_bytes, (name, one.name)


@pytest.mark.parametrize("engine", ["fsdp", "fsdp1"])
@given(num_gpus=st.integers(1, 40), factor=st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_more_gpus_hold_no_more_each(engine: str, num_gpus: int, factor: int) -> None:
    few = account(engine=engine, num_gpus=num_gpus, num_nodes=1, seq_len=32)
    many = account(engine=engine, num_gpus=num_gpus * factor, num_nodes=1, seq_len=32)
    padding = NUM_TENSORS * SMALL["intermediate_size"] * 4
    for name in ("parameters", "optimizer_states"):
        one, other = few.phases[3].components[name], many.phases[3].components[name]
        assert other <= one + 2 * padding, name


@pytest.mark.parametrize("num_gpus", [1, 2, 7, 8, 48])
def test_the_shards_cover_the_model(num_gpus: int) -> None:
    made = account(engine="fsdp", num_gpus=num_gpus, num_nodes=1, seq_len=32)
    whole = account(engine="ddp", num_gpus=1, seq_len=32, precision="fp32")
    parameters = whole.phases[0].components["parameters"]
    assert made.phases[1].components["parameters"] * num_gpus >= parameters


@pytest.mark.parametrize("engine", ["fsdp", "fsdp1"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_keeping_parameters_gathered_never_costs_less(engine: str, strategy: str) -> None:
    made = account(engine=engine, num_gpus=8, seq_len=128, fsdp_strategy=strategy)
    sharded = account(engine=engine, num_gpus=8, seq_len=128)
    assert made.peak.peak_bytes >= sharded.peak.peak_bytes


class TestSurprises:
    """What real engines do and users do not expect."""

    def test_accumulating_without_sync_holds_whole_gradients(self) -> None:
        fields: dict[str, Any] = {
            "engine": "fsdp", "num_gpus": 64, "seq_len": 64, "gradient_accumulation_steps": 4,
        }  # fmt: skip
        synced = account(**fields, engine_options={"sync_each_batch": True})
        kept = account(**fields, engine_options={"sync_each_batch": False})
        whole = account(engine="ddp", num_gpus=1, seq_len=32).phases[0].components["parameters"]
        assert kept.phases[1].components["gradients"] >= whole
        assert synced.phases[1].components["gradients"] < 0.05 * whole

    @pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
    def test_states_that_leave_are_there_for_the_step_alone(self, optimizer: str) -> None:
        """prime-rl's ``CPUOffloadOptimizer``: the step is as full as ever, and CPU RAM has what every other phase has not."""
        fields: dict[str, Any] = {
            "engine": "fsdp", "num_gpus": 2, "seq_len": 64, "gradient_accumulation_steps": 2,
            "optimizer": optimizer,
        }  # fmt: skip
        stay = account(**fields)
        leave = account(**fields, engine_options={"states_leave": True})
        states = stay.phases[1].components["optimizer_states"]
        for before, after in zip(stay.phases[:-1], leave.phases[:-1], strict=True):
            held = states * (before.components.get("optimizer_states", 0) > 0)
            assert before.peak_bytes - after.peak_bytes == (0 if after.name == "step" else held)
        assert states > 0
        assert leave.host.held_bytes - stay.host.held_bytes == pytest.approx(states, rel=0.007)

    def test_fsdp2_on_one_gpu_copies_every_unit(self) -> None:
        made = account(engine="fsdp", num_gpus=1, seq_len=32, precision="bf16")
        plain = account(engine="ddp", num_gpus=1, seq_len=32, precision="bf16")
        assert made.peak.peak_bytes > plain.peak.peak_bytes
        assert made.peak.components["gathered_parameters"] > 0

    def test_ddp_counts_every_gradient_twice(self) -> None:
        one = account(engine="ddp", num_gpus=1, seq_len=32)
        two = account(engine="ddp", num_gpus=2, seq_len=32)
        assert two.held_bytes - one.held_bytes == one.phases[0].components["parameters"]

    def test_fsdp1_keeps_gradients_after_zero_grad_with_original_parameters(self) -> None:
        fields: dict[str, Any] = {"engine": "fsdp1", "num_gpus": 8, "seq_len": 32}
        flat = account(**fields)
        views = account(**fields, engine_options={"use_orig_params": True})
        assert views.held_bytes - flat.held_bytes > 0.9 * flat.phases[1].components["parameters"]

    def test_every_rank_loads_the_whole_model_into_cpu_ram(self) -> None:
        whole = account(engine="fsdp", num_gpus=8, seq_len=32).host
        shared = account(
            engine="fsdp", num_gpus=8, seq_len=32, engine_options={"init_device": "meta"}
        ).host
        assert whole.load_bytes > 7 * shared.load_bytes
        # To the byte: each weight of it is a whole number of an allocation's 512.
        width, rows = SMALL["hidden_size"], SMALL["vocab_size"]
        layer = width * (3 * width + 3 * SMALL["intermediate_size"] + 2)
        numel = SMALL["num_hidden_layers"] * layer + (2 * rows + 1) * width
        assert whole.load_bytes == 4 * numel

    def test_offloading_leaves_no_states_on_the_gpu(self) -> None:
        made = account(engine="fsdp", num_gpus=8, seq_len=32, offload_param="cpu")
        assert "optimizer_states" not in made.phases[3].components
        assert made.host.held_bytes > 0

    def test_fsdp1_offload_keeps_gradient_shards_on_the_gpu_through_backward(self) -> None:
        fields: dict[str, Any] = {
            "num_gpus": 2, "seq_len": 32, "offload_param": "cpu", "checkpointing": "full",
        }  # fmt: skip
        first = account(engine="fsdp1", **fields).phases[2].components["gradients"]
        second = account(engine="fsdp", **fields).phases[2].components["gradients"]
        assert first > second

    def test_a_forward_prefetch_of_fsdp1_raises_the_backward_peak(self) -> None:
        fields: dict[str, Any] = {"engine": "fsdp1", "num_gpus": 8, "seq_len": 32}
        ahead = account(**fields, engine_options={"forward_prefetch": True})
        assert ahead.phases[2].peak_bytes > account(**fields).phases[2].peak_bytes
