from collections import Counter
from typing import Any

import pytest

from memplan.estimator import Estimate, Verdict, estimate
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.report.estimates.changes import advice_text
from memplan.search.advice import advise, hints_for
from memplan.search.change_search import FEW_TOKENS
from memplan.search.megatron_advice import megatron_changes
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.adapters import Lora
from memplan.training.choices import Recomputation
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.units import MIB


@pytest.mark.parametrize(
    ("model", "gpu", "setup", "change"),
    [
        pytest.param(
            "llama-3.2-1b", "a100-40gb",
            {"num_gpus": 8, "zero_stage": 2, "micro_batch_size": 8, "seq_len": 2048},
            "--kernels liger (", id="kernels that make no logits",
        ),
        pytest.param(
            "gpt2-xl", "a100-40gb", {"num_gpus": 8, "zero_stage": 2, "micro_batch_size": 16},
            "micro-batch 16 -> 4", id="smaller micro-batch",
        ),
        pytest.param(
            "qwen2.5-1.5b", "a100-40gb",
            {"num_gpus": 8, "zero_stage": 3, "seq_len": 2048, "micro_batch_size": 3},
            "expandable segments save", id="the allocator's segments alone",
        ),
        pytest.param(
            "llama-3.2-1b", "t4",
            {"num_gpus": 8, "zero_stage": 3, "seq_len": 1536, "precision": "fp16-master"},
            "checkpointing saves", id="checkpointing",
        ),
        pytest.param(
            "llama-3.1-8b", "a100-80gb",
            {"num_gpus": 8, "zero_stage": 0, "checkpointing": "full"}, ": ZeRO-1 saves",
            id="a higher stage",
        ),
        pytest.param(
            "llama-3.1-8b", "a100-80gb", {"num_gpus": 8, "engine": "ddp", "checkpointing": "full"},
            ": FSDP2 saves", id="another engine",
        ),
        pytest.param(
            "llama-3.1-8b", "h100", {"seq_len": 512, "checkpointing": "full"},
            "cpu optimizer save", id="offload",
        ),
        pytest.param(
            "llama-3.1-8b", "h100",
            {"num_gpus": 8, "zero_stage": 3, "seq_len": 131072, "checkpointing": "full"},
            "sequences shared over", id="a long sequence",
        ),
        pytest.param(
            "llama-3.1-405b", "h100",
            {"num_gpus": 256, "engine": "fsdp", "seq_len": 4096, "checkpointing": "full"},
            "tensor parallel over", id="large layers",
        ),
        pytest.param(
            "llama-3.1-70b", "h100", {
                "num_gpus": 8, "zero_stage": 3, "seq_len": 512,
                "engine_options": {"zero_init": False},
            },
            "zero.Init", id="loading",
        ),
    ],
)  # fmt: skip
def test_the_nearest_change(model: str, gpu: str, setup: dict[str, Any], change: str) -> None:
    spec = load_model(model)
    answer = estimate(spec, TrainingSetup(**setup), load_gpu(gpu))
    assert answer.verdict is not Verdict.FITS
    advice = advise(spec, answer)
    assert advice.better is not None
    assert advice.better.verdict is Verdict.FITS
    assert change in advice_text(advice)


def test_what_nothing_helps_says_how_much_is_missing() -> None:
    spec = load_model("llama-3.1-405b")
    card = load_gpu("t4")
    setup = TrainingSetup(engine="ddp", seq_len=131072)
    advice = advise(spec, estimate(spec, setup, card))
    assert advice.better is None
    assert "no change" in advice_text(advice)


def test_of_what_more_gpus_do_the_fewest_are_advised() -> None:
    """Without checkpointing it takes far more of them (256 of these): whoever has one would not ask for so many."""
    spec = load_model("mistral-7b")
    advice = advise(spec, estimate(spec, TrainingSetup(), load_gpu("4090")))
    assert advice.better is not None
    found = advice.better.setup
    assert (found.num_gpus, found.checkpointing) == (8, Recomputation.FULL)


def test_of_ever_more_gpus_the_most_are_asked_once_the_first_are_too_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One way of two has to be replayed in vain: the most GPUs are asked then, and not each number in between.

    States of the others are seen to be too much over a step of few tokens.
    """
    asked = Counter[int]()

    def counted(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> Estimate:
        asked[setup.num_gpus] += setup.seq_len != FEW_TOKENS
        return estimate(model, setup, gpu)

    monkeypatch.setattr("memplan.search.change_search.bare_estimate", counted)
    monkeypatch.setattr("memplan.search.change_search.is_long_to_tell", lambda _: True)
    spec, card = load_model("gpt2"), replace(load_gpu("t4"), torch_total_bytes=1180 * MIB)
    setup = TrainingSetup(num_gpus=8, zero_stage=3, seq_len=512, checkpointing="full")
    better = advise(spec, estimate(spec, setup, card)).better
    assert better is not None
    assert better.verdict is Verdict.TIGHT
    assert asked[16] == asked[8192] == 2
    assert asked[32] == asked[1024] == 1
    assert asked[4096] == 0


def test_what_loads_too_large_with_the_most_gpus_is_not_asked_with_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank loads the whole of a quantized base, however many share it: steps of few tokens say so."""
    asked = Counter[tuple[Engine, int, bool]]()

    def counted(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None) -> Estimate:
        asked[setup.chosen_engine, setup.num_gpus, setup.seq_len == FEW_TOKENS] += 1
        return estimate(model, setup, gpu)

    monkeypatch.setattr("memplan.search.change_search.bare_estimate", counted)
    monkeypatch.setattr("memplan.search.change_search.is_long_to_tell", lambda _: True)
    spec, card = load_model("gpt2-xl"), replace(load_gpu("t4"), torch_total_bytes=1200 * MIB)
    setup = TrainingSetup(adapter=Lora(), quantize="nf4", seq_len=512, checkpointing="full")
    advise(spec, estimate(spec, setup, card))
    fsdp = {key[1:] for key in asked if key[0] is Engine.FSDP and key[1] > 1}
    assert fsdp == {(2, True), (1024, True)}


def test_a_smaller_micro_batch_keeps_the_global_batch() -> None:
    spec, card = load_model("gpt2-xl"), load_gpu("a100-40gb")
    setup = TrainingSetup(num_gpus=8, zero_stage=2, micro_batch_size=32, seq_len=512)
    better = advise(spec, estimate(spec, setup, card)).better
    assert better is not None
    done = better.setup.micro_batch_size * better.setup.gradient_accumulation_steps
    assert better.setup.micro_batch_size < 32
    assert done == 32


def test_advice_stands_only_where_nothing_fits_a_gpu() -> None:
    spec = load_model("llama-3.1-8b")
    cards = [load_gpu("v100-16gb"), load_gpu("h100")]
    setups = [TrainingSetup(num_gpus=8, zero_stage=stage) for stage in (0, 2)]
    rows = [[estimate(spec, setup, card) for card in cards] for setup in setups]
    hints = hints_for(spec, rows)
    assert [each.answer.gpu.gpu_id for each in hints.advice if each.answer.gpu] == [
        "v100-sxm2-16gb"
    ]
    assert hints.largest[(1, "h100-sxm-80gb")] == 2
    assert hints.largest[(0, "h100-sxm-80gb")] == 0
    again = hints_for(spec, rows, places=[(1, "h100-sxm-80gb")])
    assert again.largest == {(1, "h100-sxm-80gb"): 2}


def test_a_split_model_is_advised_within_its_group() -> None:
    setup = TrainingSetup(num_gpus=8, engine="ddp", tensor_parallel=8)  # type: ignore[arg-type]
    model = load_model("llama-3.1-70b")
    better = advise(model, estimate(model, setup, load_gpu("h100-80gb"))).better
    assert better is not None
    assert better.setup.tensor_parallel == 8
    assert better.setup.chosen_engine in (Engine.DDP, Engine.FSDP, Engine.DEEPSPEED)


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        # Nothing is computed again for it.
        ("llama-65b", {"num_gpus": 64, "tensor_parallel": 4, "pipeline_parallel": 4,
                       "gradient_accumulation_steps": 16, "seq_len": 4096},
         {"sequence_parallel": True, "checkpointing": Recomputation.NONE}),
        # Stages of 126 layers, uneven ones.
        ("llama-3.1-405b", {"num_gpus": 256, "tensor_parallel": 8, "sequence_parallel": True,
                            "gradient_accumulation_steps": 16, "seq_len": 8192},
         {"tensor_parallel": 8, "checkpointing": Recomputation.FULL}),
    ],
)  # fmt: skip
def test_megatron_stays_megatron(model: str, fields: dict[str, Any], words: dict[str, Any]) -> None:
    """Its optimizer is sharded, sequences and layers computed again, and the model split further, before all else."""
    gpu = load_gpu("a100-80gb" if model == "llama-65b" else "h100")
    found = estimate(load_model(model), TrainingSetup(engine="megatron", **fields), gpu)
    better = advise(load_model(model), found).better
    assert better is not None
    assert better.verdict is Verdict.FITS
    assert better.setup.engine is Engine.MEGATRON
    assert better.setup.num_gpus == fields["num_gpus"]
    assert {name: getattr(better.setup, name) for name in words} == words


def test_megatron_splits_the_least_first() -> None:
    """Over one more node's worth of ranks before two, layers before stages; layers that do not come out even
    are told stage by stage, and each stage has some."""
    model = load_model("llama-3.1-405b")  # of 126 layers
    setup = TrainingSetup(
        engine="megatron", num_gpus=64, tensor_parallel=2, sequence_parallel=True, checkpointing="full",
        gradient_accumulation_steps=16, seq_len=512,
    )  # fmt: skip
    found = [
        (each.tensor_parallel, each.pipeline_parallel, each.layers_per_stage)
        for each in megatron_changes(model, setup)
        if each.tensor_parallel * each.pipeline_parallel > 2
    ]
    splits = [(tensor, stages) for tensor, stages, _ in found]
    assert splits[:5] == [(4, 1), (2, 2), (8, 1), (4, 2), (2, 4)]
    assert splits[: len(splits) // 2] == sorted(
        splits[: len(splits) // 2], key=lambda split: (split[0] * split[1], split[1])
    )
    for _, stages, layers in found:
        assert (layers is None) == (126 % stages == 0)
        assert layers is None or (len(layers) == stages and sum(layers) == 126 and min(layers) > 0)
