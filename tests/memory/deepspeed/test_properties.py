"""What holds for every DeepSpeed account, and where the engine breaks what one would expect."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.memory.account import RankAccount
from memplan.memory.deepspeed.partition import FlatBuffer, FlatPartition, ModelWeights, shard_numel
from tests.memory.deepspeed.conftest import Account
from tests.memory.deepspeed.small_model import SMALL, TIED, given_for

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

SETUPS = st.fixed_dictionaries(
    {
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "num_gpus": st.sampled_from([1, 2, 3, 8]),
        "checkpointing": st.sampled_from(["none", "full"]),
        "gradient_accumulation_steps": st.sampled_from([1, 3]),
        "micro_batch_size": st.sampled_from([1, 2]),
        "precision": st.sampled_from(["bf16-master", "fp16-master", "fp32"]),
        "engine_options": st.fixed_dictionaries(
            {},
            optional={
                "reduce_bucket_size": st.sampled_from([1000, 100_000, "auto", 500_000_000]),
                "overlap_comm": st.booleans(),
                "stage3_prefetch_bucket_size": st.sampled_from([0, 1000, "auto"]),
                "stage3_param_persistence_threshold": st.sampled_from([0, 300, 70_000]),
                "stage3_max_live_parameters": st.sampled_from([0, 500_000]),
                "stage3_max_reuse_distance": st.sampled_from([0, 500_000]),
                "sub_group_size": st.sampled_from([100_000, 10_000_000]),
                "grad_accum_dtype": st.sampled_from(["fp32", "bf16"]),
                "communication_data_type": st.sampled_from(["fp32", "fp16", "bf16"]),
                "contiguous_gradients": st.booleans(),
                "reduce_scatter": st.booleans(),
                "torch_adam": st.booleans(),
                "round_robin_gradients": st.booleans(),
                "zero_init": st.booleans(),
            },
        ),
    }
)


def held(account: RankAccount, component: str) -> int:
    """A component as it is held between steps: nothing else touches these."""
    return account.phases[-1].components.get(component, 0)


@SETTINGS
@given(fields=SETUPS, tied=st.booleans(), offloads=st.booleans())
def test_phases_are_sums(
    account: Account, fields: dict[str, object], tied: bool, offloads: bool
) -> None:
    if offloads and fields["zero_stage"]:
        fields = {**fields, "offload_optimizer": "cpu"}
    options = dict(fields["engine_options"])  # type: ignore[call-overload]
    if not fields["zero_stage"]:
        # Another dtype than the weights' is refused there: test_options.
        options.pop("grad_accum_dtype", None)
    fields = {**fields, "engine_options": options}
    made = account(config=TIED if tied else SMALL, **fields)
    assert [phase.name for phase in made.phases] == [
        "load", "forward", "backward", "step", "save",
    ]  # fmt: skip
    for phase in made.phases:
        assert phase.peak_bytes == sum(phase.components.values())
        assert all(entry.num_bytes > 0 for entry in phase.entries)
    assert made.held_bytes <= made.peak.peak_bytes
    assert made.host.load_bytes > 0


@SETTINGS
@given(ranks=st.integers(1, 40), round_robin=st.booleans())
def test_parts_cover_the_model(weights: ModelWeights, ranks: int, round_robin: bool) -> None:
    pieces = [0] * len(weights.numels)
    buffer = FlatBuffer(weights, num_ranks=ranks, round_robin=round_robin)
    assert [rank for kind in buffer.every_rank for rank in kind.ranks] == list(range(ranks))
    for rank in range(ranks):
        part = FlatPartition(buffer, rank)
        assert sum(numel for _, numel in part.kind.slices) <= part.size
        for index, numel in part.kind.slices:
            pieces[index] += numel
            assert numel in buffer.cuts(index)
            assert sum(buffer.cuts(index)) == weights.numels[index]
    assert pieces == weights.numels
    assert all(shard_numel(count, ranks) * ranks >= count for count in weights.numels)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("component", ["parameters", "master_weights", "optimizer_states"])
def test_more_gpus_hold_no_more(account: Account, stage: int, component: str) -> None:
    # Padding: two elements a rank in the flat buffer, one a parameter in shards.
    slack = 16 * len(ModelWeights(given_for(SMALL).tape).numels)
    before = None
    for ranks in (1, 2, 3, 4, 8, 16, 64):
        now = held(account(num_gpus=ranks, zero_stage=stage), component)
        if before is not None:
            assert now <= before + slack
        before = now


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_more_tokens_never_lower_a_peak(account: Account, stage: int, checkpointing: str) -> None:
    def peaks(**fields: object) -> list[int]:
        made = account(zero_stage=stage, checkpointing=checkpointing, **fields)
        return [phase.peak_bytes for phase in made.phases]

    for small, large in (
        ({"micro_batch_size": 1}, {"micro_batch_size": 3}),
        ({"seq_len": 64}, {"seq_len": 128}),
    ):
        assert all(a <= b for a, b in zip(peaks(**small), peaks(**large), strict=True))


def test_stage_2_keeps_whole_parameters(account: Account, weights: ModelWeights) -> None:
    """A rank keeps the gradients of every parameter that touches its part, whole."""
    part = FlatPartition(FlatBuffer(weights, num_ranks=64, round_robin=False), 0)
    assert part.whole_numel > 3 * part.size
    made = account(num_gpus=64, zero_stage=2, engine_options={"reduce_bucket_size": 1000})
    assert made.phases[3].components["gradients"] == 2 * part.whole_numel


def test_buckets_outweigh_what_sharding_saves(account: Account) -> None:
    """Two fixed buckets of 1 GB are more than this whole model's states."""
    whole = account(num_gpus=8, zero_stage=0)
    sharded = account(num_gpus=8, zero_stage=2)
    assert sharded.held_bytes < whole.held_bytes
    assert sharded.peak.peak_bytes > whole.peak.peak_bytes


def test_offload_keeps_the_largest_parameter(account: Account, weights: ModelWeights) -> None:
    made = account(zero_stage=2, offload_optimizer="cpu")
    assert held(made, "communication_buffers") == 2 * weights.largest_trained


def test_stage_3_stays_gathered_across_the_turn(account: Account) -> None:
    """With the default limits a small model is gathered whole where activations peak."""
    options = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
    released = {
        **options, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    }  # fmt: skip
    kept = account(zero_stage=3, engine_options=options).phases[2]
    freed = account(zero_stage=3, engine_options=released).phases[2]
    assert kept.components["gathered_parameters"] > 4 * freed.components["gathered_parameters"]


def test_one_rank_gathers_nothing(account: Account) -> None:
    made = account(zero_stage=3, num_gpus=1)
    assert all("gathered_parameters" not in phase.components for phase in made.phases[1:])


def test_a_full_gpu_flattens_on_the_cpu(account: Account) -> None:
    roomy = account(zero_stage=2, num_gpus=64)
    load = roomy.phases[0].peak_bytes
    tight = account(zero_stage=2, num_gpus=64, capacity=load - 1)
    assert tight.phases[0].peak_bytes < load
    assert tight.host.load_bytes == 2 * roomy.host.load_bytes


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_have_no_states(account: Account, stage: int) -> None:
    trained = account(zero_stage=stage, num_gpus=2)
    frozen = account(zero_stage=stage, num_gpus=2, freeze="embeddings")
    assert held(frozen, "parameters") == pytest.approx(held(trained, "parameters"))
    assert held(frozen, "optimizer_states") < held(trained, "optimizer_states")


def test_nvme_leaves_buffers(account: Account) -> None:
    options = {"offload_param.buffer_size": 100_000, "offload_param.max_in_cpu": 0}
    on_cpu = account(zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    on_nvme = account(
        zero_stage=3,
        offload_optimizer="nvme",
        offload_param="nvme",
        engine_options={**options, "sub_group_size": 50_000},
    )
    assert on_nvme.host.held_bytes < on_cpu.host.held_bytes


def test_saving_gathers_the_model_on_rank_0(account: Account) -> None:
    options = {"stage3_gather_16bit_weights_on_model_save": True}
    first = account(zero_stage=3, engine_options=options)
    second = account(rank=1, zero_stage=3, engine_options=options)
    plain = account(zero_stage=3)
    assert first.phases[-1].peak_bytes > plain.phases[-1].peak_bytes
    assert first.host.save_bytes > second.host.save_bytes


def test_page_locked_blocks_are_powers_of_two(account: Account) -> None:
    exact = account(zero_stage=2, offload_optimizer="cpu")
    real = account(zero_stage=2, offload_optimizer="cpu", kernel_scratch=True)
    pageable = account(
        zero_stage=2,
        offload_optimizer="cpu",
        kernel_scratch=True,
        engine_options={"pin_memory": False},
    )
    assert exact.host.held_bytes < real.host.held_bytes < 2 * exact.host.held_bytes
    assert pageable.host.held_bytes == exact.host.held_bytes
