"""The estimate as a whole: its parts agree with one another."""

import gc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.errors import SetupError
from memplan.estimator import least_bytes
from memplan.estimator.job import prepared
from memplan.estimator.recording import record, record_and_walk, shared_options, tape_options
from memplan.graph.core.options import TapeOptions
from memplan.graph.model import record_model
from memplan.hardware.gpu import gpu_from_memory
from memplan.memory.step import StepWalk
from memplan.report.rows.schema import COLUMN_MEANINGS
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.compilation import Compilation
from memplan.training.optimizers import Optimizer
from memplan.training.setup import TrainingSetup
from tests.plain_step import plain_step

SMALL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 1000,
}  # fmt: skip

SETUPS = st.fixed_dictionaries(
    {
        "micro_batch_size": st.integers(1, 4),
        "seq_len": st.integers(1, 700),
        "precision": st.sampled_from(["fp32", "bf16", "bf16-amp", "bf16-autocast", "fp16-amp"]),
        "optimizer": st.sampled_from(["adamw-fused", "adamw-foreach", "sgd", "sgd-momentum"]),
        "checkpointing": st.sampled_from(["none", "full", "selective", 0.5]),
        "kernels": st.sampled_from(["hf", "torchtitan", "megatron", "liger"]),
        "attention": st.sampled_from([None, "eager", "sdpa"]),
        "kernel_scratch": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(SETUPS)
def test_a_peak_is_the_sum_of_its_components(values: dict[str, object]) -> None:
    answer = memplan.estimate(SMALL, TrainingSetup(engine="ddp", **values))
    for phase in answer.phases.values():
        assert phase.peak_bytes == sum(phase.components.values())
        assert all(entry.num_bytes > 0 for entry in phase.entries)
    steps = [answer.phases[name].peak_bytes for name in ("forward", "backward", "step")]
    assert answer.peak_bytes == max(steps)
    assert answer.held_bytes <= answer.peak_bytes


@settings(max_examples=40, deadline=None)
@given(SETUPS)
def test_more_tokens_never_need_less(values: dict[str, object]) -> None:
    peaks = [
        memplan.estimate(SMALL, TrainingSetup(engine="ddp", **{**values, **more})).peak_bytes
        for more in ({}, {"micro_batch_size": 8}, {"micro_batch_size": 8, "seq_len": 1024})
    ]
    assert peaks == sorted(peaks)


def test_checkpointing_keeps_less() -> None:
    kept = [
        memplan.estimate(
            SMALL, TrainingSetup(precision="bf16", seq_len=512, checkpointing=value)
        ).activations_bytes
        for value in ("full", 0.5, "none")
    ]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3


def test_the_row_is_documented() -> None:
    row = memplan.estimate(SMALL, gpu="h100").to_dict()
    assert list(row) == list(COLUMN_MEANINGS)
    assert all(isinstance(row[name], int) for name in row if name.endswith("_bytes") and row[name])


@pytest.mark.parametrize(
    ("capacity", "verdict"),
    [(10**8, "OOM"), (10**9, "tight"), (10**10, "fits")],
)
def test_verdict(capacity: int, verdict: str) -> None:
    answer = memplan.estimate(SMALL, gpu=gpu_from_memory(capacity))
    total = answer.total_bytes
    expected = {
        "OOM": total.low > capacity,
        "tight": total.low <= capacity < total.high,
        "fits": total.high <= capacity,
    }
    assert answer.verdict is not None
    assert answer.verdict.value == verdict
    assert expected[verdict]


def test_without_a_gpu_there_is_no_verdict() -> None:
    assert memplan.estimate(SMALL).verdict is None


def test_an_old_gpu_runs_another_kernel() -> None:
    """Flash attention needs sm_80; a grouped-query model falls to the math kernel on a V100."""
    grouped = {**SMALL, "num_key_value_heads": 2}
    kernels = {gpu: memplan.estimate(grouped, gpu=gpu).attention_kernel for gpu in ("v100", "a100")}
    assert kernels == {"v100": "math", "a100": "flash"}


def test_a_class_with_eager_attention_only_says_so() -> None:
    assert memplan.estimate("bloom-560m", gpu="h100").attention_kernel == "eager"


def test_defaults_are_told() -> None:
    told = " ".join(memplan.estimate("llama-3.1-8b").assumptions)
    for word in (
        "2,048 tokens",
        "131,072",
        "bf16-amp",
        "adamw-fused",
        "sdpa",
        "checkpointing none",
    ):
        assert word in told


def test_more_tokens_than_positions() -> None:
    answer = memplan.estimate("gpt2", TrainingSetup(seq_len=4096))
    assert any("1,024 positions" in note for note in answer.notes)
    assert not memplan.estimate("gpt2").notes


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_weights_that_no_pass_reads_make_ddp_raise(options: dict[str, bool]) -> None:
    """SqueezeBERT's pooler, where tokens are masked; so it is in transformers 5.23 over DDP of torch 2.13."""
    config = {
        "model_type": "squeezebert",
        "num_hidden_layers": 1,
        "architectures": ["SqueezeBertForMaskedLM"],
    }
    setup = TrainingSetup(num_gpus=2, engine="ddp", engine_options=options)  # type: ignore[arg-type]
    found = [note for note in memplan.estimate(config, setup).notes if "No pass reads" in note]
    assert [note.split(": ")[0] for note in found] == [
        "No pass reads transformer.pooler.dense.weight and 1 more"
    ][: not options]
    alone = memplan.estimate(config, TrainingSetup(seq_len=64))
    assert not any("No pass reads" in note for note in alone.notes)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_experts_that_stage_3_cannot_let_go_of_are_said(checkpointing: str) -> None:
    """Solar Open's cut to three layers requested 11.9 GB on PyTorch's CUDA build, of which 1.5 are two layers' experts."""
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
        "num_experts": 8, "moe_intermediate_size": 512, "vocab_size": 1000,
    }  # fmt: skip
    setup = TrainingSetup(zero_stage=3, num_gpus=4, checkpointing=checkpointing)  # type: ignore[arg-type]
    found = [note for note in memplan.estimate(config, setup).notes if "stay gathered" in note]
    held = 2 * 8 * 3 * 256 * 512 * 2 / 2**30
    assert [f"Weights of {held:.2f} GiB" in note for note in found] == [True][
        : checkpointing == "none"
    ]


def test_what_is_compiled_is_said() -> None:
    answer = memplan.estimate(SMALL, TrainingSetup(compile="layer"))  # type: ignore[arg-type]
    assert "torch.compile of each layer" in answer.assumptions
    assert not answer.unmodelled
    assert any("torch.compile times its kernels" in note for note in answer.notes)


def test_a_compiled_peak_above_eagers_is_said() -> None:
    """Llama-3.2-1B's embedding: all gradients, and the table's in fp32, at the end of backward."""
    setup = TrainingSetup(precision="bf16", seq_len=512, compile="model")  # type: ignore[arg-type]
    answer = memplan.estimate("llama-3.2-1b", setup)
    eager = memplan.estimate("llama-3.2-1b", replace(setup, compile=Compilation.NONE))
    assert answer.peak_bytes > eager.peak_bytes
    (note,) = [each for each in answer.notes if "raises the peak" in each]
    assert f"{(answer.peak_bytes - eager.peak_bytes) / 2**30:.1f} GiB" in note
    assert not any("raises the peak" in each for each in eager.notes)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_gpus": 0}, "num_gpus"),
        ({"num_gpus": 8, "num_nodes": 3}, "evenly"),
        ({"precision": "bf16-master"}, "bf16-master does not exist with the engine ddp"),
        ({"engine": "deepsped"}, "Did you mean 'deepspeed'"),
        ({"zero_stage": 2}, "only deepspeed"),
        ({"num_gpus": 8, "zero_stage": 5}, "zero_stage"),
        ({"seq_len": 0}, "seq_len"),
        ({"micro_batch_size": True}, "micro_batch_size"),
        ({"checkpointing": "some"}, "checkpointing"),
        ({"checkpointing": 1.5}, "from 0 to 1"),
        ({"offload_optimizer": "cpu"}, "cannot offload"),
        ({"num_gpus": 8, "zero_stage": 2, "offload_param": "cpu"}, "stage 3"),
        ({"num_gpus": 8, "tensor_parallel": 3}, "divisible"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_setups_that_cannot_be(values: dict[str, object], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        TrainingSetup(**values)


@pytest.mark.parametrize("gpu", ["v100-32gb", "a100-80gb", "t4", "h100"])
@pytest.mark.parametrize(("name", "batch"), [("t5-small", 1), ("gpt2", 1), ("gpt2", 16)])
def test_a_walk_that_cards_share_is_each_cards_own(name: str, batch: int, gpu: str) -> None:
    model = load_model(name)
    card = load_gpu(gpu)
    setup = TrainingSetup(micro_batch_size=batch, seq_len=512)
    own = tape_options(setup.resolve(model.context_length, has_bf16=card.has_bf16), card)
    shared = shared_options(model, own)
    expected = StepWalk(record_model(model, own)).run()
    for options in (own, shared):
        _, found = record_and_walk(model, options)
        assert plain_step(found) == plain_step(expected)


def test_a_tape_is_written_once_for_all_cards_that_run_the_same() -> None:
    model = load_model("gpt2")
    setup = TrainingSetup(seq_len=512).resolve(model.context_length)
    first, second, other = (
        record(model, tape_options(setup, load_gpu(gpu)))
        for gpu in ("a100-80gb", "l40s", "v100-32gb")
    )
    assert first.segments is second.segments is not other.segments
    assert first.options.multiprocessors == 108 != second.options.multiprocessors


def test_cards_share_a_walk_only_where_no_long_sum_is_split() -> None:
    model = load_model("gpt2")

    def shared(gpu: str, batch: int) -> TapeOptions:
        setup = TrainingSetup(micro_batch_size=batch, seq_len=512)
        options = tape_options(setup.resolve(model.context_length, has_bf16=True), load_gpu(gpu))
        return shared_options(model, options)

    assert shared("a100-80gb", 1).multiprocessors == shared("h100", 1).multiprocessors
    assert shared("a100-80gb", 16).multiprocessors == 108


SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "peak", "reserved"),
    [
        ("h100", 1050274492, 1371537408),
        ("b200", 1067051708, 1388314624),
        ("a100-80gb", 992992924, 1207959552),
        ("l4", 992992924, 1199570944),
    ],
)
def test_an_optimizers_sums_are_split_by_the_card(gpu: str, peak: int, reserved: int) -> None:
    """Adafactor of transformers, as PyTorch's CUDA build and its allocator ran it on each card."""
    setup = TrainingSetup(optimizer="adafactor", micro_batch_size=2, seq_len=512, precision="bf16")
    found = memplan.estimate(SMALL_LLAMA, setup, gpu=gpu)
    assert found.peak_bytes == pytest.approx(peak, rel=1e-4)
    assert found.reserved_bytes == reserved


def test_an_optimizers_sums_leave_the_walk_shared() -> None:
    model = load_model(SMALL_LLAMA)
    setup = TrainingSetup(optimizer="adafactor", seq_len=256, precision="bf16").resolve(
        model.context_length, has_bf16=True
    )
    first, second = (
        prepared(model, setup, load_gpu(gpu)).rank_input for gpu in ("a100-80gb", "a40")
    )
    assert first.passes is second.passes
    assert first.tape is second.tape
    assert first.reducing_device != second.reducing_device
    plain = replace(setup, optimizer=Optimizer.ADAMW_FUSED)
    alike = [prepared(model, plain, load_gpu(gpu)).rank_input for gpu in ("a100-80gb", "a40")]
    assert alike[0].device is alike[1].device is None


@settings(max_examples=40, deadline=None)
@given(SETUPS, st.sampled_from(["ddp", "fsdp", "deepspeed"]))
def test_no_estimate_is_below_what_activations_alone_take(
    values: dict[str, object], engine: str
) -> None:
    setup = TrainingSetup(engine=engine, num_gpus=4, **{**values, "precision": None})
    model = memplan.load_model(SMALL)
    alone = least_bytes(model, setup)
    assert 0 < alone < memplan.estimate(model, setup).peak_bytes


@pytest.mark.parametrize(
    "values",
    [{"zero_stage": 3}, {"engine": "megatron", "pipeline_parallel": 2}],
    ids=["zero3", "pipeline"],
)
def test_little_is_left_to_the_collector(values: dict[str, object]) -> None:
    """A sweep's memory does not grow with its rows, although the collector waits for ten million objects."""

    def left(batch: int) -> int:
        gc.collect()
        memplan.estimate(
            "gpt2" if "zero_stage" in values else "qwen2.5-0.5b",
            TrainingSetup(
                num_gpus=8,
                micro_batch_size=batch,
                seq_len=256,
                gradient_accumulation_steps=2,
                **values,
            ),
            gpu="h100",
        ).to_dict()
        return gc.collect()

    gc.freeze()  # what other tests have left is not looked through again
    gc.disable()
    try:
        left(1)  # what is remembered is made
        assert left(2) < 500
    finally:
        gc.enable()


def test_a_kernel_is_said_as_it_is_counted() -> None:
    """gpt-oss's class has no sdpa; a package that it is asked for it runs, whose sinks go into the kernel."""
    for asked, said in (
        (None, "attention eager (the class has nothing else)"),
        ("flash3", "attention flash3"),
    ):
        setup = TrainingSetup(attention=asked, seq_len=64)  # type: ignore[arg-type]
        found = memplan.estimate("gpt-oss-20b", setup)
        assert said in found.assumptions
