"""What engines send in a step, in bytes of each parameter, and how long each exchange takes.

Rajbhandari et al., arXiv:1910.02054, section 7: with Ψ parameters an all-reduce, or a reduce-scatter and an
all-gather of stages 1 and 2, moves 2Ψ; stage 3 gathers once more for backward: 3Ψ.
"""

from collections import Counter

import pytest

import memplan
from memplan.compute.lanes import Lane
from memplan.compute.rates import UPDATE_SHARE, rates_of
from memplan.estimator.job import Job
from memplan.estimator.time.exchanged import (
    Beside,
    beside_segments,
    exchange_seconds,
    exchanged_apart,
)
from memplan.estimator.time.step_time import time_of
from memplan.estimator.time.timer import Case, Laid, Passed, Run, _stage
from memplan.hardware.network import STORAGE_BYTES_PER_S, Network
from memplan.memory.accounts import step_visits
from memplan.memory.programs.deepspeed_stages.zero import HOST_PASSES_BYTES
from memplan.training.splitting.exchange import ALONE, Exchange, ExchangeKind, Hiding, Ranks, Visit

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
NETWORK = Network(
    within_node=100.0,
    between_nodes=10.0,
    to_host=20.0,
    to_host_alone=40.0,
    gpus_per_node=8,
    host_memory=400.0,
)
KIND = ExchangeKind
NO_CACHE = {
    "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}  # fmt: skip


def moved(**settings: object) -> dict[tuple[str, ExchangeKind], float]:
    """Bytes of a step by part and kind, for each parameter; copies on the card left out."""
    return {
        key: size for key, size in moved_anywhere(**settings).items() if key[1] is not KIND.COPY
    }


def moved_anywhere(**settings: object) -> dict[tuple[str, ExchangeKind], float]:
    """The same with them."""
    model = memplan.load_model(CONFIG)
    setup = memplan.TrainingSetup(**{"num_gpus": 8, "seq_len": 128, **settings})  # type: ignore[arg-type]
    job = Job.of(model, setup, memplan.load_gpu("h100"))
    found: Counter[tuple[str, ExchangeKind]] = Counter()
    for visit in step_visits(job.given):
        for exchange, count in visit.exchanges:
            found[visit.part, exchange.kind] += count * exchange.num_bytes
    return {key: size / model.num_params for key, size in found.items()}


def test_data_parallel_engines_send_two_messages_of_the_gradients() -> None:
    """An all-reduce is two of them; in stages 1 and 2 the weights are gathered where its second half was."""
    update = {("step", KIND.UPDATE): 28.0}
    assert moved(engine="ddp") == {("backward", KIND.ALL_REDUCE): 4.0} | update
    assert moved(zero_stage=0) == {("backward", KIND.ALL_REDUCE): 2.0} | update
    shared = {("step", KIND.UPDATE): 3.5, ("step", KIND.ALL_GATHER): 2.0}
    for stage in (1, 2):
        assert moved(zero_stage=stage) == {("backward", KIND.ALL_REDUCE): 2.0} | shared


def test_stage_3_gathers_for_each_pass() -> None:
    found = moved(zero_stage=3, engine_options=NO_CACHE)
    gathered = {part for part, kind in found if kind is KIND.ALL_GATHER}
    assert gathered >= {"forward", "backward"}
    assert found["forward", KIND.ALL_GATHER] == pytest.approx(2.0)
    assert found["backward", KIND.ALL_GATHER] == pytest.approx(2.0)
    assert found["backward", KIND.REDUCE_SCATTER] == pytest.approx(2.0)
    assert found["step", KIND.UPDATE] == pytest.approx(28 / 8)


def test_fsdp_gathers_in_16_bits_and_reduces_in_32() -> None:
    passes = {("forward", KIND.ALL_GATHER): 2.0, ("backward", KIND.ALL_GATHER): 2.0}
    rest = {("backward", KIND.REDUCE_SCATTER): 4.0, ("step", KIND.UPDATE): 3.5}
    assert moved(engine="fsdp") == passes | rest
    hybrid = moved(engine="fsdp", num_gpus=16, fsdp_strategy="hybrid")
    # Each rank's eighth of the gradients, with one row more where rows are not divided by eight.
    assert hybrid.pop(("backward", KIND.ALL_REDUCE)) == pytest.approx(4 / 8, rel=2e-3)
    assert hybrid == passes | rest


def test_fsdp_copies_shards_and_what_it_gathers() -> None:
    """An eighth is read in fp32 and written in bf16, then all of it both ways; so are gradients, in fp32, to be
    reduced."""
    copied = {
        part: size
        for (part, kind), size in moved_anywhere(engine="fsdp").items()
        if kind is KIND.COPY
    }
    gathered = (4 + 2) / 8 + 2 * 2
    assert copied == pytest.approx({"forward": gathered, "backward": gathered + 2 * 4}, rel=10e-4)


@pytest.mark.parametrize("engine", ["fsdp", "fsdp1"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_fsdp_brings_offloaded_shards_for_each_gathering(engine: str, strategy: str) -> None:
    """An eighth in fp32, ahead of its use; FSDP1 brings it for backward too where what it gathered is still there."""
    offloaded = {"offload_param": "cpu", "offload_optimizer": "cpu", "fsdp_strategy": strategy}
    found = moved(engine=engine, **offloaded)
    again = engine == "fsdp1" or strategy == "full_shard"
    brought = {part: size for (part, kind), size in found.items() if kind is KIND.TO_GPU}
    # Shards are padded, and FSDP2's tensors rounded up to 512 bytes each: 0.23 % at the most.
    shard = pytest.approx(4 / 8, rel=3e-3)
    assert brought == ({"forward": shard, "backward": shard} if again else {"forward": shard})
    assert found["backward", KIND.TO_HOST] == shard
    model, setup = memplan.load_model(CONFIG), memplan.TrainingSetup(
        num_gpus=8, seq_len=128, engine=engine, **offloaded
    )  # type: ignore[arg-type]  # fmt: skip
    visits = step_visits(Job.of(model, setup, memplan.load_gpu("h100")).given)
    hidings = {
        each.hiding for visit in visits for each, _ in visit.exchanges if each.kind is KIND.TO_GPU
    }
    assert hidings == {Hiding.AHEAD}


def test_accumulation_gathers_each_time_and_reduces_once_under_fsdp() -> None:
    once, three = (moved(engine="fsdp", gradient_accumulation_steps=count) for count in (1, 3))
    for key, size in three.items():
        assert size == (3 if key[1] is KIND.ALL_GATHER else 1) * once[key]
    assert moved(engine="ddp", gradient_accumulation_steps=3) == moved(engine="ddp")


def test_an_offloaded_optimizer_sends_gradients_there_and_weights_back() -> None:
    dealt = {"round_robin_gradients": True}
    found = moved(zero_stage=2, offload_optimizer="cpu", engine_options=dealt)
    assert found["backward", KIND.TO_HOST] == 4 / 8  # in fp32
    assert found["step", KIND.TO_GPU] == 2 / 8  # cast on the CPU, from a pinned buffer
    assert found["step", KIND.HOST_UPDATE] == (28 + HOST_PASSES_BYTES) / 8


def test_gradients_go_to_the_host_rank_by_rank_unless_they_are_dealt_out() -> None:
    """DeepSpeed #1067: parts of the flat buffer come one after the other, and all ranks wait for the one whose they are."""
    small = {"reduce_bucket_size": 10**4}
    found = moved(zero_stage=2, offload_optimizer="cpu", engine_options=small)
    assert ("backward", KIND.TO_HOST) not in found
    in_turn = found["backward", KIND.TO_HOST_IN_TURN]
    # Of a bucket over two ranks' border the larger part alone is waited for: seven borders, 7 % of so small a model.
    assert in_turn == pytest.approx(4, rel=0.08)
    assert in_turn < 4
    added = moved(
        zero_stage=2, offload_optimizer="cpu", gradient_accumulation_steps=3, engine_options=small
    )
    assert added["backward", KIND.TO_GPU_IN_TURN] == pytest.approx(in_turn)  # twice, of two bytes


def test_stage_3_brings_offloaded_gradients_back_to_measure_them() -> None:
    """``partition_grads``: there in 16 bits, back for their norm, and there once more in fp32."""
    found = moved(zero_stage=3, offload_optimizer="cpu", engine_options=NO_CACHE)
    assert found["backward", KIND.TO_HOST] == pytest.approx((2 + 4) / 8)
    assert found["backward", KIND.TO_GPU] == pytest.approx(2 / 8)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        (KIND.COPY, 800 / rates_of(None).bytes_per_s),
        (KIND.UPDATE, 800 / (UPDATE_SHARE * rates_of(None).bytes_per_s)),
        (KIND.TO_GPU, 800 / 20),
        (KIND.TO_HOST, 800 / 20),
        (KIND.TO_HOST_IN_TURN, 800 / 40),
        (KIND.FROM_STORAGE, 800 / STORAGE_BYTES_PER_S),
        (KIND.TO_STORAGE, 800 / STORAGE_BYTES_PER_S),
        (KIND.HOST_UPDATE, 800 * 8 / 400),  # a node's ranks share its memory
        (KIND.ALL_GATHER, 800 * 7 / 8 / 100),
        (KIND.ALL_REDUCE, 2 * 800 * 7 / 8 / 100),
    ],
)
def test_an_exchange_takes_its_bytes_over_its_link(kind: ExchangeKind, seconds: float) -> None:
    exchange = Exchange(0, kind, 800, Ranks(8), Hiding.NONE)
    assert exchange_seconds(exchange, NETWORK, rates_of(None)) == pytest.approx(seconds, rel=2e-5)


def test_exchanges_stand_where_they_are_hidden() -> None:
    def one(kind: ExchangeKind, hiding: Hiding, segment: int = 0) -> tuple[Exchange, int]:
        return Exchange(segment, kind, 800, Ranks(8), hiding), 3

    visit = Visit("forward", (
        one(KIND.COPY, Hiding.NONE), one(KIND.ALL_GATHER, Hiding.NONE),
        one(KIND.ALL_GATHER, Hiding.AHEAD), one(KIND.ALL_REDUCE, Hiding.BEHIND),
        one(KIND.TO_GPU, Hiding.AHEAD, 1), one(KIND.TO_HOST, Hiding.BEHIND, 1),
        one(KIND.FROM_STORAGE, Hiding.NONE, 1), one(KIND.TO_GPU, Hiding.NONE, 1),
    ))  # fmt: skip
    found = beside_segments(visit, NETWORK, rates_of(None))
    assert found.keys() == {0, 1}
    assert found[0][1:4] == pytest.approx((21, 21, 42), rel=2e-5)
    assert found[0].copied_s == pytest.approx(3 * 800 / rates_of(None).bytes_per_s)
    assert found[0][4:] == (0, 0, 0)
    assert found[1][:4] == (0, 0, 0, 0)
    assert found[1][4:] == pytest.approx((120, 120, 120))


def test_what_is_exchanged_apart_has_its_lane() -> None:
    kinds = (KIND.UPDATE, KIND.HOST_UPDATE, KIND.TO_STORAGE, KIND.ALL_GATHER, KIND.BROADCAST)
    visit = Visit("step", tuple((Exchange(-1, kind, 800, ALONE, Hiding.NONE), 2) for kind in kinds))
    found = exchanged_apart(visit, NETWORK, rates_of(None))
    assert [each.lane for each in found] == [
        Lane.COMPUTE, Lane.HOST, Lane.HOST, Lane.LINK, Lane.LINK,
    ]  # fmt: skip
    assert [each.words for each in found] == [kind.value for kind in kinds]
    assert found[1].seconds == 2 * 800 * 8 / 400
    assert found[3].seconds == 0  # nobody to send to


def test_a_case_stretches_each_part_by_its_own_factor() -> None:
    beside = Beside(
        copied_s=4.0, blocking_s=1.0, ahead_s=2.0, behind_s=3.0, fetched_s=5.0, stored_s=6.0,
        waited_s=7.0,
    )  # fmt: skip
    case = Case(compute=10, links=100, host=1000, interference=0, asked=0.5)
    stage = _stage(Laid("a", 2, 8.0, 3.0, 9.0, beside), case)
    assert stage == ("a", 2, 10 * (8 + 4 / 2), 1.5, 100 * (1 + 9), 200, 300, 5000, 6000, 7000)


def ended(*stages: Laid, asked: float = 1.0) -> tuple[float, float]:
    """When a pass without exchanges ends, and how long the GPU waited for the host in it."""
    case = Case(compute=1.0, links=1, host=1, interference=0, asked=asked, is_expected=True)
    run = Run(case)
    run.pass_over(Passed(stages, (), exchanges=False))
    return run.clock.now_s, run.clock.host_bound_s


def test_the_host_asks_ahead_of_the_gpu() -> None:
    """What the GPU is behind at the end of one stage hides what the host needs longer in the next."""
    slow = Laid("a", 2, 3.0, 7.0, 0.0, Beside(copied_s=4.0))  # 10 s on the GPU, 14 on the host
    fast = Laid("b", 1, 5.0, 1.0, 0.0, Beside())
    assert ended(slow, fast) == (14 + 5, 4)
    assert ended(fast, slow) == (15, 0)
    assert ended(fast, slow, asked=2.0) == (2 + 28, 15)


def test_new_weights_of_stage_3_come_from_pages_that_are_not_pinned() -> None:
    found = moved(zero_stage=3, offload_optimizer="cpu", engine_options=NO_CACHE)
    assert found["step", KIND.TO_GPU_PAGEABLE] == pytest.approx(2 / 8)
    kept_there = moved(
        zero_stage=3, offload_optimizer="cpu", offload_param="cpu", engine_options=NO_CACHE
    )
    assert ("step", KIND.TO_GPU_PAGEABLE) not in kept_there


def test_the_cpu_steps_beside_what_its_engine_lets_it() -> None:
    """ZenFlow once in four steps; SuperOffload beside the backward pass, unless gradients are clipped, which waits for all."""

    def seconds(stage: int, **options: object) -> float:
        setup = memplan.TrainingSetup(
            num_gpus=8, seq_len=4096, zero_stage=stage, checkpointing="full", offload_optimizer="cpu",
            engine_options={key.replace("__", "."): value for key, value in options.items()},
        )  # fmt: skip
        job = Job.of(memplan.load_model("llama-3.1-8b"), setup, memplan.load_gpu("h100"))
        return time_of(job).expected_s

    each_time, deferred = seconds(2), seconds(2, zenflow__update_interval=4)
    hidden = seconds(2, zenflow__update_interval=4, zenflow__overlap_step=True)
    assert hidden < deferred < each_time
    beside = seconds(3, offload_optimizer__super_offload=True)
    clipped = seconds(3, offload_optimizer__super_offload=True, gradient_clipping=1.0)
    assert beside < clipped == seconds(3)


def test_a_second_set_of_shards_is_gathered_where_it_is() -> None:
    """ZeRO++'s hpZ: forward among all ranks, backward among those of a node."""
    setup = memplan.TrainingSetup(
        num_gpus=64,
        seq_len=64,
        zero_stage=3,
        engine_options={**NO_CACHE, "zero_hpz_partition_size": 8},
    )
    job = Job.of(memplan.load_model("qwen2.5-0.5b"), setup, memplan.load_gpu("h100"))
    gathered = {
        (visit.part, exchange.ranks.degree)
        for visit in step_visits(job.given)
        for exchange, _ in visit.exchanges
        if exchange.kind is KIND.ALL_GATHER
    }
    assert ("forward", 64) in gathered
    assert {degree for part, degree in gathered if part == "backward"} == {8}
