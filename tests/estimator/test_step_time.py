"""Step times: what has to hold whatever the rates are, and what practitioners say as numbers."""

from collections import OrderedDict
from dataclasses import replace

import pytest

import memplan
from memplan.compute.lanes import Lane
from memplan.compute.rates import rates_of
from memplan.compute.slowest import slowest_factor
from memplan.errors import InputError
from memplan.estimator.job import Job
from memplan.estimator.time.pipeline_timer import BUBBLE
from memplan.estimator.time.run_cost import TimeQuestion, run_cost
from memplan.estimator.time.site import Site
from memplan.estimator.time.step_time import StepTime, step_time, time_of
from memplan.estimator.time.timer import HOST, LAUNCHES, LINKS
from memplan.hardware.network import STORAGE_BYTES_PER_S
from memplan.memory.accounts import step_visits

LLAMA = "llama-3.1-8b"


def timed(model: str = LLAMA, gpu: str = "h100", **settings: object) -> StepTime:
    setup = memplan.TrainingSetup(**{"num_gpus": 8, "seq_len": 4096, **settings})  # type: ignore[arg-type]
    return time_of(Job.of(memplan.load_model(model), setup, memplan.load_gpu(gpu)))


def test_the_range_holds_what_is_expected() -> None:
    time = timed(engine="fsdp", micro_batch_size=2)
    assert time.low_s < time.expected_s < time.high_s
    assert time.binding == time.shares[0].words == "products of matrices"
    assert time.tokens == 8 * 2 * 4096
    assert time.mfu * time.peak_flops_per_s == pytest.approx(time.flops_per_s_per_gpu)


def test_an_estimate_has_its_time() -> None:
    setup = memplan.TrainingSetup(num_gpus=8, engine="fsdp", seq_len=4096, micro_batch_size=2)
    answer = memplan.estimate(LLAMA, setup, gpu="h100")
    assert answer.time.expected_s == step_time(answer).expected_s
    assert answer.time.mfu == timed(engine="fsdp", micro_batch_size=2).mfu


def test_a_time_asked_for_late_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest answers' jobs are at hand; those of others are recorded again."""
    setups = [memplan.TrainingSetup(seq_len=length) for length in (256, 512)]
    answers = [memplan.estimate("gpt2", each, gpu="h100") for each in setups]
    soon = [each.time.expected_s for each in answers]
    monkeypatch.setattr("memplan.estimator.job._LATEST", OrderedDict())
    assert [each.time.expected_s for each in answers] == soon
    assert soon[0] < soon[1]


def test_micro_batches_add_up() -> None:
    """Those between the first and the last are told once."""
    few, many = (timed(zero_stage=2, gradient_accumulation_steps=count) for count in (4, 64))
    each = (many.expected_s - few.expected_s) / 60
    three = timed(zero_stage=2, gradient_accumulation_steps=3)
    assert few.expected_s - three.expected_s == pytest.approx(each, rel=1e-9)


def test_full_recomputation_costs_a_third_of_computing() -> None:
    """Korthikanti et al., arXiv:2205.05198: 30-40 % more time where a layer runs again as a whole.

    torch stops before a layer's last product, a third of a plain network's. Attention's scores alone are
    a few percent (2.7 % of the FLOPs of a 530B model, table 5).
    """
    none, full, selective = (
        timed("opt-66b", gpu="a100-80gb", seq_len=2048, micro_batch_size=4, engine="fsdp",
              attention="eager", kernels="megatron", checkpointing=each).expected_s
        for each in ("none", "full", "selective")
    )  # fmt: skip
    assert 0.2 <= full / none - 1 <= 0.35
    assert 0.005 < selective / none - 1 <= 0.08


def test_zero_3_slows_down_across_nodes_with_slow_links() -> None:
    """DeepSpeed's and Lightning's advice: with slow links between nodes ZeRO-3 is the first to wait."""
    fast, slow = 50e9, 1.25e9
    llama, gpu = memplan.load_model(LLAMA), memplan.load_gpu("a100-80gb")
    found = {}
    for stage in (1, 3):
        setup = memplan.TrainingSetup(
            num_gpus=32, zero_stage=stage, seq_len=2048, gradient_accumulation_steps=16,
            engine_options={"overlap_comm": True},
        )  # fmt: skip
        job = Job.of(llama, setup, gpu)
        times = [time_of(job, site=Site(between_nodes=rate)).expected_s for rate in (fast, slow)]
        found[stage] = times[1] / times[0]
    assert found[3] > 2
    assert found[1] < 0.7 * found[3]


def test_an_optimizer_on_the_cpu_costs_what_deepspeed_measured() -> None:
    """Its CPU Adam steps 10 billion parameters in 2.57 s on one node (arXiv:2101.06840, table 4).

    Nodes are faster by now: the low end of the range; theirs is inside. The table has Adam alone, so that gradients are dealt
    out here: rank by rank their copies take as long again.
    """
    dealt = {"round_robin_gradients": True}
    shape = {
        "gpu": "a100-80gb",
        "zero_stage": 2,
        "num_gpus": 8,
        "seq_len": 1024,
        "engine_options": dealt,
    }
    plain, offloaded = (timed(**shape, offload_optimizer=place) for place in ("none", "cpu"))  # type: ignore[arg-type]
    per_10b = 10 / 8.03
    assert per_10b * (offloaded.low_s - plain.low_s) < 2.57
    assert per_10b * (offloaded.high_s - plain.high_s) > 2.57


def test_tensor_parallelism_belongs_into_a_node() -> None:
    """Megatron-LM's rule (arXiv:2104.04473, takeaway 1): within a node, not across."""
    inside, across = (
        timed("llama-3.1-70b", num_gpus=64, num_nodes=nodes, engine="fsdp", tensor_parallel=8,
              micro_batch_size=2, checkpointing="full", sequence_parallel=True)
        for nodes in (8, 16)
    )  # fmt: skip
    assert across.tokens_per_s < 0.9 * inside.tokens_per_s


def test_small_batches_are_bound_by_the_host() -> None:
    time = timed("gpt2", num_gpus=1, engine="ddp", seq_len=128, micro_batch_size=1)
    assert time.binding == "waiting for the host to launch kernels"


def test_a_run_has_days_energy_and_a_cost() -> None:
    time = timed(engine="fsdp", micro_batch_size=2)
    question = TimeQuestion(tokens=10**12, prices=2.5)
    run = run_cost(time, question, memplan.load_gpu("h100"), sequences=16)
    assert run is not None
    assert run.days == pytest.approx(10**12 / time.tokens_per_s / 86_400)
    assert run.cost == pytest.approx(2.5 * run.gpu_hours)
    assert run.energy_kwh == pytest.approx(0.7 * run.gpu_hours)
    examples = replace(question, tokens=None, examples=1_600, epochs=3)
    run = run_cost(time, examples, memplan.load_gpu("h100"), sequences=16)
    assert run is not None
    assert run.num_steps == pytest.approx(300)


def test_a_known_utilisation_takes_the_models_place() -> None:
    time = timed(engine="fsdp").with_mfu(0.4)
    assert time.mfu == pytest.approx(0.4)
    assert time.low_s == time.high_s


def test_a_pipeline_waits_for_its_ends() -> None:
    """Narayanan et al., arXiv:2104.04473: the bubble is p - 1 micro-batches long; interleaved, 1 / v of that."""
    shared = {"engine": "ddp", "pipeline_parallel": 8, "gradient_accumulation_steps": 32}
    plain = timed("opt-13b", attention="eager", **shared)
    each = {each.words: each.seconds for each in plain.shares}
    waited = each["waiting for other stages of the pipeline"] / plain.expected_s
    assert waited == pytest.approx(7 / (32 + 7), rel=0.3)
    finer = timed("opt-13b", pipeline_schedule="interleaved-1f1b", virtual_stages=5, **shared)
    each = {each.words: each.seconds for each in finer.shares}
    assert each["waiting for other stages of the pipeline"] / finer.expected_s < waited / 2


def test_activations_that_go_to_the_host_take_the_link() -> None:
    """Streamed, they cost what the link cannot send beside computing; copied at once, all of it."""
    none, streamed, at_once, inputs = (
        timed(engine="fsdp", checkpointing=policy, offload_activations=way).expected_s
        for way, policy in (
            ("none", "none"), ("streamed", "none"), ("save-on-cpu", "none"), ("checkpoints", "full"),
        )
    )  # fmt: skip
    again = timed(engine="fsdp", checkpointing="full").expected_s
    assert none < streamed < at_once
    assert again < inputs < 1.15 * again


def test_nvme_is_slower_than_cpu_ram() -> None:
    """States are read and written once a step, 32 bytes a parameter with gradients; weights before every layer."""
    shared = {"gpu": "a100-80gb", "engine": "deepspeed", "zero_stage": 3, "seq_len": 1024}
    at_home, in_ram, on_nvme, weights = (
        timed(**shared, offload_optimizer=states, offload_param=params).expected_s  # type: ignore[arg-type]
        for states, params in (("none", "none"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))
    )  # fmt: skip
    per_gpu = 32 * 8.03e9 / 8
    assert at_home < in_ram < on_nvme < weights
    assert on_nvme - in_ram == pytest.approx(per_gpu / STORAGE_BYTES_PER_S, rel=9e-5)


def test_a_utilisation_above_one_is_explained() -> None:
    gpu = memplan.load_gpu("h100")
    rates = rates_of(gpu)
    faster = replace(
        rates, bytes_per_s=30 * rates.bytes_per_s, kernel_s=0.0,
        flops_per_s={each: 30 * rate for each, rate in rates.flops_per_s.items()},
    )  # fmt: skip
    setup = memplan.TrainingSetup(num_gpus=1, seq_len=512, micro_batch_size=64)
    job = Job.of(memplan.load_model("opt-13b"), setup, gpu)
    assert not time_of(job).notes
    time = time_of(job, rates=faster)
    assert time.mfu > 1
    assert "counts every score" in time.notes[0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="above 0"):
        TimeQuestion(mfu=1.5)
    with pytest.raises(InputError, match="one of the two"):
        TimeQuestion(tokens=1, examples=1)


def test_an_odd_number_of_tokens_costs_what_an_even_one_does() -> None:
    """A weight's gradient sums over tokens, which lie row by row: only a row's length has to be aligned."""
    even, odd = (
        timed(engine="fsdp", seq_len=4096 + more, micro_batch_size=1).expected_s for more in (0, 1)
    )
    assert odd == pytest.approx(even, rel=0.002)


def test_a_tower_attends_over_its_own_positions() -> None:
    """4,096 patches of a picture of SAM, of whose text there is one token: about as long as its products."""
    shares = {
        each.words: each.seconds for each in timed("sam-vit-base", num_gpus=1, seq_len=1).shares
    }
    assert 0 < shares["attention"] < 2 * shares["products of matrices"]


def test_what_is_sent_goes_by_how_many_ranks_there_are() -> None:
    """Also where each holds the same, and one number was asked for before another; an optimizer's copies are of one."""
    found = []
    for num_gpus in (8, 512):
        setup = memplan.TrainingSetup(num_gpus=num_gpus, engine="ddp")
        job = Job.of(memplan.load_model("gpt2"), setup, memplan.load_gpu("h100"))
        visits = step_visits(job.given)
        found.append({each.ranks.degree for visit in visits for each, _ in visit.exchanges})
    assert found == [{1, 8}, {1, 512}]


PATHS = [
    {"engine": "fsdp", "micro_batch_size": 2},
    {"engine": "fsdp", "num_gpus": 16, "gradient_accumulation_steps": 5, "checkpointing": "full"},
    {"zero_stage": 3, "seq_len": 512},
    {"zero_stage": 2, "offload_optimizer": "cpu", "gradient_accumulation_steps": 4},
    {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    {"engine": "ddp", "num_gpus": 1, "model": "qwen2.5-0.5b", "seq_len": 256},
    {"engine": "fsdp", "model": "qwen2.5-1.5b", "job": "ppo:rollout=vllm,sleep=1"},
    {"engine": "fsdp", "offload_activations": "save-on-cpu"},
    {"engine": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2, "gradient_accumulation_steps": 8},
    {
        "engine": "megatron", "pipeline_parallel": 4, "virtual_stages": 2, "pipeline_schedule": "interleaved-1f1b",
        "gradient_accumulation_steps": 8, "num_gpus": 16, "engine_options": {"use_distributed_optimizer": True},
    },
]  # fmt: skip


@pytest.mark.parametrize("settings", PATHS)
def test_parts_and_critical_path_add_up_to_the_step(settings: dict[str, object]) -> None:
    """To a millionth; the drawn path has no gap, and with one micro-batch each lane's part of it is what the shares say."""
    time = timed(**settings)  # type: ignore[arg-type]
    assert sum(each.seconds for each in time.shares) == pytest.approx(time.expected_s)
    now_s = 0.0
    for each in time.path:
        assert each.start_s == pytest.approx(now_s)
        now_s = each.stop_s
    assert now_s <= time.expected_s + 1e-6
    if settings.get("gradient_accumulation_steps", 1) != 1 and "pipeline_parallel" not in settings:
        return  # micro-batches that are alike are drawn once
    assert now_s == pytest.approx(time.expected_s)
    if "pipeline_parallel" in settings:
        bubble = sum(each.busy_s for each in time.path if each.lane is Lane.STAGES)
        told = sum(each.seconds for each in time.shares if each.words == BUBBLE)
        assert bubble == pytest.approx(told)
        return
    for lane, words in ((Lane.LINK, LINKS), (Lane.HOST, HOST), (Lane.ASKED, LAUNCHES)):
        own = sum(each.busy_s for each in time.path if each.lane is lane)
        assert own == pytest.approx(
            sum(each.seconds for each in time.shares if each.words == words)
        )


def test_a_step_takes_as_long_as_the_slowest_gpu() -> None:
    """Without a link between them it would compute as long on 64 nodes as on one."""
    one, many = (
        sum(
            each.seconds
            for each in timed(engine="fsdp", num_gpus=count).shares
            if each.words in ("products of matrices", "attention")
        )
        for count in (8, 512)
    )
    assert many / one == pytest.approx(slowest_factor(512) / slowest_factor(8), rel=1e-9)
    assert 1.02 < many / one < 1.03


def test_stage_3_on_one_gpu_is_hooked_all_the_same() -> None:
    """Its hooks around each module stay: 0.92 of what they take with eight was measured (``tests/data/host_times.jsonl``)."""
    alone, two = (
        timed(
            "qwen2.5-0.5b", engine="deepspeed", zero_stage=3, num_gpus=count, seq_len=128
        ).expected_s
        for count in (1, 2)
    )
    assert 0.8 < alone / two < 0.95
