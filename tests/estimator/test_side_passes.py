"""What runs beside a training step: other models' passes, completions, weights that are handed over."""

import pytest

import memplan
from memplan.estimator.job import Job
from memplan.estimator.time.side_passes import ENGINE_STEP_S
from memplan.estimator.time.step_time import StepTime, time_of

QWEN = "qwen2.5-1.5b"
PARAMS = 1.54e9


def timed(job: str | None, model: str = QWEN, **settings: object) -> StepTime:
    fields = {
        "num_gpus": 8,
        "engine": "fsdp",
        "seq_len": 2048,
        "micro_batch_size": 2,
        "job": job,
        **settings,
    }
    setup = memplan.TrainingSetup(
        **{name: each for name, each in fields.items() if each is not None}
    )  # type: ignore[arg-type]
    return time_of(Job.of(memplan.load_model(model), setup, memplan.load_gpu("h100")))


def spent(time: StepTime, words: str) -> float:
    return sum(each.seconds for each in time.shares if each.words.startswith(words))


def test_a_reference_costs_a_forward_pass() -> None:
    """A third of forward and backward of the same model, which other rows of the tape do not change."""
    without, with_it = (timed(f"dpo:reference={each}") for each in ("precomputed", "same"))
    assert 0.2 < spent(with_it, "other models") / without.expected_s < 0.4
    assert sum(each.seconds for each in with_it.shares) == pytest.approx(with_it.expected_s)


def test_a_critic_is_trained_and_a_reward_model_scores() -> None:
    plain, ppo = timed("grpo:rollout=none"), timed("ppo:rollout=none")
    # A critic forward and backward, three passes forward (earlier ones, reference, reward).
    assert 1.3 < spent(ppo, "other models") / plain.expected_s < 3


def test_a_token_of_an_engine_reads_every_weight_and_every_key() -> None:
    """PagedAttention's paper (arXiv:2309.06180): decoding is bound by memory. 3.1 GB at 3 TB/s are a millisecond."""
    tokens = 1024
    found = timed(f"grpo:rollout=vllm,completion_length={tokens}")
    each = spent(found, "generating") / tokens - ENGINE_STEP_S
    assert 2 * PARAMS / 3.35e12 < each < 4 * 2 * PARAMS / 3.35e12
    longer = timed(f"grpo:rollout=vllm,completion_length={2 * tokens}", seq_len=3072)
    assert spent(longer, "generating") > 1.9 * spent(found, "generating")
    more = timed(f"grpo:rollout=vllm,completion_length={tokens}", gradient_accumulation_steps=4)
    assert spent(found, "generating") < spent(more, "generating") < 2 * spent(found, "generating")
    assert found.low_s < 0.75 * found.expected_s  # shorter ones
    assert any("completions are 1,024 tokens" in each for each in found.notes)


def test_pictures_are_read_with_the_prompt_alone() -> None:
    """A later token finds them in keys and values: its step runs no tower."""
    job = "grpo:rollout=vllm,completion_length=512"
    shown, unseen = (
        spent(timed(job, "qwen2.5-vl-3b", images_per_sample=count), "generating")
        for count in (1, 0)
    )
    assert unseen < shown < 1.5 * unseen


def test_a_batch_shrinks_on_the_way_to_its_longest_completion() -> None:
    """All wait for the longest, of which few still run at the end: it costs less than were all as long."""
    shape = {"seq_len": 4096, "gradient_accumulation_steps": 32}
    short, mixed, long = (
        spent(timed(f"grpo:rollout=vllm,completion_length={usual}{longest}", **shape), "generating")
        for usual, longest in ((512, ""), (512, ",longest_completion=3072"), (3072, ""))
    )
    assert short + 2500 * ENGINE_STEP_S < mixed < long


def test_an_engine_serves_in_half_whatever_is_trained_in() -> None:
    half, single = (timed("grpo:rollout=vllm", precision=each) for each in ("bf16-mixed", "fp32"))
    assert spent(half, "generating") == pytest.approx(spent(single, "generating"))


def test_transformers_generate_waits_for_the_host() -> None:
    engine, own = (timed(f"grpo:rollout={each}") for each in ("vllm", "hf"))
    assert own.expected_s > 3 * engine.expected_s
    assert spent(own, "waiting for the host") > spent(own, "generating")


def test_room_for_keys_decides_how_many_sequences_run_together() -> None:
    shape = {"seq_len": 8192, "gradient_accumulation_steps": 32}
    wide, narrow = (
        timed(f"grpo:rollout=vllm,gpu_memory_utilization={share}", **shape) for share in (0.5, 0.1)
    )
    assert spent(narrow, "generating") > 1.3 * spent(wide, "generating")


def test_an_engine_that_sleeps_lightly_takes_its_weights_along() -> None:
    """At level 1 they go to the CPU and come back; at level 2 they are dropped, and trained ones are handed over as ever."""
    awake, light, deep = (timed(f"grpo:rollout=vllm,sleep={level}") for level in (0, 1, 2))
    assert deep.expected_s == awake.expected_s
    there_and_back = 2 * 2 * PARAMS / 63e9  # over PCIe 5's sixteen lanes at the most
    assert there_and_back < light.expected_s - awake.expected_s < 1.5 * there_and_back
    moved = spent(light, "transfers to and from the host")
    assert moved == pytest.approx(light.expected_s - awake.expected_s)


def test_weights_that_do_not_fit_a_share_are_split_and_all_are_handed_over() -> None:
    plain = timed("grpo:rollout=vllm", model="qwen2.5-32b")
    asleep = timed("grpo:rollout=vllm,sleep=1,leaves=all", model="qwen2.5-32b")
    away = asleep.expected_s - plain.expected_s
    # Two ways over PCIe for weights of 66 GB on some GPUs together, and for each rank's eighth of 12 bytes a weight.
    assert 2 * 12 * 32.8e9 / 8 / 63e9 < away < 6
    assert spent(plain, "communication") > spent(
        timed("grpo:rollout=none", model="qwen2.5-32b"), "communication"
    )


def test_passes_without_gradients_send_no_checkpoints_away() -> None:
    """Where the trained pass has its checkpoints in CPU RAM, one that only scores saves nothing that could go."""
    found = memplan.estimate(
        "qwen2.5-0.5b",
        memplan.TrainingSetup(
            job="grpo",
            seq_len=128,
            checkpointing="full",
            offload_activations="checkpoints",  # type: ignore[arg-type]
        ),
    )
    assert found.peak_bytes > found.setup.seq_len
