"""Step times of Megatron's engine and of spread experts; published runs are in ``tests/measured``."""

import pytest

import memplan
from memplan.compute.products import Shape, product_seconds
from memplan.compute.rates import rates_of
from memplan.compute.roofline import segment_work
from memplan.dtypes import DType
from memplan.estimator.flops import estimate_flops
from memplan.estimator.job import Job
from memplan.estimator.time.step_time import StepTime, time_of

GPT_22B = {
    "model_type": "gpt2", "n_embd": 6144, "n_head": 64, "n_layer": 48, "vocab_size": 51200,
    "n_positions": 2048, "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
LOCAL = {"transformer_impl": "local"}


def timed(model: object = "llama-3.1-8b", gpu: str = "h100", **settings: object) -> StepTime:
    setup = memplan.TrainingSetup(
        **{"num_gpus": 8, "engine": "megatron", "seq_len": 4096, **settings}  # type: ignore[arg-type]
    )
    return time_of(Job.of(memplan.load_model(model), setup, memplan.load_gpu(gpu)))  # type: ignore[arg-type]


def seconds(time: StepTime, words: str) -> float:
    return next((each.seconds for each in time.shares if each.words.startswith(words)), 0.0)


def test_recomputation_costs_what_was_measured() -> None:
    """Korthikanti et al., arXiv:2205.05198, table 4: 39 % with whole layers, 4 % with attention's core and
    sequence parallelism, beside neither; an 8-GPU run of 22 billion parameters."""
    shape = {"gpu": "a100-80gb", "seq_len": 2048, "micro_batch_size": 4, "tensor_parallel": 8}
    none, full = (
        timed(GPT_22B, checkpointing=each, engine_options=LOCAL, **shape).expected_s
        for each in ("none", "full")
    )
    both = timed(
        GPT_22B, checkpointing="selective", sequence_parallel=True, engine_options=LOCAL, **shape
    ).expected_s
    assert 0.28 <= full / none - 1 <= 0.42
    assert -0.02 <= both / none - 1 <= 0.08


def test_every_product_is_counted() -> None:
    """Gradients that products write where the main ones lie are computed like others."""
    model = memplan.load_model("llama-3.1-8b")
    plain, fused = (
        estimate_flops(model, memplan.TrainingSetup(num_gpus=8, seq_len=4096, engine=engine))  # type: ignore[arg-type]
        for engine in ("fsdp", "megatron")
    )
    assert fused.backward == pytest.approx(plain.backward)
    assert fused.forward == pytest.approx(plain.forward)


def test_overlapping_hides_the_reduction() -> None:
    shape = {"num_gpus": 64, "gradient_accumulation_steps": 4}
    options = {"use_distributed_optimizer": True}
    waits = timed(engine_options=options, **shape)
    hides = timed(
        engine_options={**options, "overlap_grad_reduce": True, "overlap_param_gather": True},
        **shape,
    )
    assert seconds(waits, "communication") > 3 * seconds(hides, "communication")
    assert hides.expected_s < waits.expected_s


def test_shares_of_sequences_are_faster_than_whole_ones() -> None:
    """Less is read and written between the split blocks (arXiv:2205.05198, table 4: 3 %, on A100s; an H100's switches add up
    all-reduces, which sequences in shares do without)."""
    shape = {"tensor_parallel": 8, "micro_batch_size": 2, "gpu": "a100-80gb"}
    plain, shares = (timed(sequence_parallel=each, **shape) for each in (False, True))
    assert 0.9 < shares.expected_s / plain.expected_s < 1
    across = timed(sequence_parallel=True, num_gpus=16, num_nodes=4, **shape)
    assert across.tokens_per_s_per_gpu < 0.7 * shares.tokens_per_s_per_gpu


def test_more_virtual_stages_wait_less() -> None:
    shape = {"num_gpus": 16, "pipeline_parallel": 8, "gradient_accumulation_steps": 16}
    plain = timed(**shape)
    finer = timed(pipeline_schedule="interleaved-1f1b", virtual_stages=4, **shape)
    assert seconds(finer, "waiting for other stages") < 0.5 * seconds(
        plain, "waiting for other stages"
    )


@pytest.mark.parametrize(("ratio", "is_hidden"), [(0.3, True), (1.0, False)])
def test_chunks_go_to_the_host_beside_computing(ratio: float, *, is_hidden: bool) -> None:
    """As far as a chunk's pass lasts: Megatron-Kwai's rule for the share that is free."""
    shape = {
        "num_gpus": 256, "tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 8,
        "pipeline_schedule": "interleaved-1f1b", "virtual_stages": 5, "gradient_accumulation_steps": 16,
        "seq_len": 4096, "engine_options": {"transformer_impl": "kwai"},
    }  # fmt: skip
    model = {
        "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 22016, "num_hidden_layers": 80,
        "vocab_size": 32000, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    stays = timed(model, "h800", **shape).expected_s
    goes = timed(
        model, "h800", offload_activations="chunks", offload_activations_ratio=ratio, **shape
    ).expected_s
    assert (goes == pytest.approx(stays, rel=1e-6)) is is_hidden
    assert goes >= stays


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_tokens_sent_to_experts_take_the_link(engine: str) -> None:
    """Within a node it is fast; over nodes each token crosses the network."""
    shape = {
        "engine": engine,
        "expert_parallel": 8,
        "num_gpus": 8,
        "gradient_accumulation_steps": 8,
    }
    inside, across = (timed("mixtral-8x7b", num_nodes=nodes, **shape) for nodes in (1, 2))
    assert seconds(inside, "communication") > 0
    assert seconds(across, "communication") > 2 * seconds(inside, "communication")


def test_experts_products_are_a_kernel_each() -> None:
    """As one kernel they would share waves: 8 x 1,536 tokens of as many experts take no less than as many products by themselves."""
    config = {
        "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096,
        "num_local_experts": 64, "num_experts_per_tok": 2, "architectures": ["MixtralForCausalLM"],
    }  # fmt: skip
    model = memplan.load_model(config)
    job = Job.of(
        model,
        memplan.TrainingSetup(num_gpus=8, engine="megatron", seq_len=4096, expert_parallel=1),
        memplan.load_gpu("h100"),
    )
    rates = rates_of(memplan.load_gpu("h100"))
    tape = job.given.tape
    found = segment_work(tape, job.walked.model, rates)
    rows = 2 * 4096 / 64
    first, second = (
        64
        * product_seconds(
            Shape(1, rows, n, k),
            2,
            rates.rate_of(DType.BF16),
            rates.bytes_per_s,
            rates.num_multiprocessors,
        )
        for n, k in ((2 * 3584, 1024), (1024, 3584))
    )
    layer = next(each for each in found if each.is_unit)
    assert first + second < layer.forward.products_s < 1.5 * (first + second)


def test_a_squared_relu_keeps_what_a_gelu_does() -> None:
    """Compiled for itself it keeps its input (``squared_relu`` of Megatron's core/activations.py), as torch's GELU without a bias; Nemotron's
    norms have a bias and a weight to which one is added in the kernel."""
    config = {
        "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "vocab_size": 4096, "hidden_size": 512,
        "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "max_position_embeddings": 1024,
    }  # fmt: skip
    setup = memplan.TrainingSetup(
        num_gpus=2, engine="megatron", tensor_parallel=2, sequence_parallel=True, seq_len=512
    )
    squared, gelu = (
        memplan.estimate(memplan.load_model({**config, "hidden_act": each}), setup, gpu="h100")
        for each in ("relu2", "gelu")
    )
    assert squared.peak_bytes == gelu.peak_bytes
