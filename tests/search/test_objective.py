"""Plans by time: what practitioners choose for well-known models comes first, and objectives differ."""

import re
from functools import cache
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from memplan.errors import InputError
from memplan.estimator.time.run_cost import TimeQuestion
from memplan.estimator.time.site import Site
from memplan.report.estimates.changes import setup_label
from memplan.report.front import front_page
from memplan.report.pictures.scatter import front_picture
from memplan.report.plans.answer import run_lines
from memplan.report.plans.rows import markdown_columns, plan_rows
from memplan.search.planning.goal import Goal, Plan
from memplan.search.planning.objective import memory_front
from memplan.search.planning.planner import plan
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.choices import Offload, Recomputation, ZeroStage
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup

pytestmark = pytest.mark.long

SLOW_NETWORK = TimeQuestion(site=Site(between_nodes=10e9 / 8 / 8))
"""10 Gbit/s Ethernet, shared by the eight GPUs of a node [bytes/s]."""


def timed_plan(
    model: str, gpu: str, num_gpus: int | tuple[int, ...], seq_len: int, batch: int,
    question: TimeQuestion | None = None, limit: int = 100, **goal: Any,
) -> Plan:  # fmt: skip
    wanted = Goal(
        num_gpus=num_gpus,  # type: ignore[arg-type]
        global_batch_size=batch, base=TrainingSetup(seq_len=seq_len), limit=limit, **goal,
    )  # fmt: skip
    return _made(model, gpu, wanted, question or TimeQuestion())


@cache
def _made(model: str, gpu: str, goal: Goal, question: TimeQuestion) -> Plan:
    """A plan, which several tests look at from their side."""
    return plan(load_model(model), goal, load_gpu(gpu), times=question)


def traits(setup: TrainingSetup) -> set[str]:
    """What practitioners say of a setup, in a few words."""
    engine = setup.chosen_engine
    sharded = engine in (Engine.FSDP, Engine.FSDP1) or setup.zero_stage is ZeroStage.PARAMETERS
    offloads = setup.offload_optimizer is not Offload.NONE
    recomputes = setup.checkpointing is not Recomputation.NONE
    split = setup.tensor_parallel * setup.pipeline_parallel * setup.context_parallel > 1
    return {
        "weights sharded" if sharded else "weights whole",
        "recomputes" if recomputes else "keeps activations",
        "optimizer on the CPU" if offloads else "optimizer on the GPU",
        "layers split" if split else "layers whole",
    }


PRACTICE = {
    # nanoGPT's README: GPT-2 124M on 8 A100 40GB with DDP.
    "gpt2": (("gpt2", "a100-40gb", 8, 1024, 480), {},
             {"weights whole", "keeps activations", "layers whole", "optimizer on the GPU"}),
    # llm-foundry's table for MPT (scripts/train/benchmarking), models as large: activations are kept where they fit ...
    "7b": (("llama-2-7b", "a100-80gb", 8, 2048, 48), {"engines": (Engine.FSDP,)},
           {"weights sharded", "keeps activations", "optimizer on the GPU"}),
    # ... and computed again where they do not: on 40 GB (where a single sequence fits without, if the allocator gives
    # its cache back in every step), of 30B, of 70B.
    "7b-40gb": (("llama-2-7b", "a100-40gb", 8, 2048, 96),
                {"engines": (Engine.FSDP,), "tensor_parallel": 1}, {"weights sharded", "recomputes"}),
    "30b": (("opt-30b", "a100-80gb", 8, 2048, 24), {},
            {"weights sharded", "recomputes", "layers whole"}),
    "70b": (("llama-2-70b", "a100-80gb", 64, 2048, 512), {"engines": (Engine.FSDP,), "tensor_parallel": 1},
            {"weights sharded", "recomputes", "layers whole", "optimizer on the GPU"}),
    "70b-h100": (("llama-2-70b", "h100", 64, 2048, 512), {"engines": (Engine.FSDP,), "tensor_parallel": 1},
                 {"weights sharded", "recomputes", "layers whole", "optimizer on the GPU"}),
    # torchtitan's docs/performance: 70B on 256 H100 with FSDP2 and full recomputation.
    "torchtitan": (("llama-3.1-70b", "h100", 256, 8192, 512), {"engines": (Engine.FSDP,), "tensor_parallel": 1},
                   {"weights sharded", "recomputes", "optimizer on the GPU"}),
    # Narayanan et al., arXiv:2104.04473, section 3: layers split inside nodes, stages between them, where one copy takes
    # several nodes; NVIDIA's recipe for Llama 3 70B on 64 H100 splits so (NVIDIA-NeMo/Megatron-Bridge
    # docs/performance-summary-archive.md, 25.11: TP 4, PP 8, VP 5; NVIDIA/Megatron-LM examples/llama/README.md too).
    "megatron": (("llama-3.1-70b", "h100", 64, 8192, 128), {"engines": (Engine.MEGATRON,)},
                 {"weights whole", "layers split", "optimizer on the GPU"}),
    # DeepSpeed-Chat's README: OPT-13B on 8 A100 40GB takes ZeRO-3.
    "chat": (("opt-13b", "a100-40gb", 8, 512, 64), {"engines": (Engine.DEEPSPEED,)},
             {"weights sharded", "layers whole"}),
    # ZeRO-Offload, arXiv:2101.06840: on one GPU the optimizer of billions of parameters is the CPU's.
    "offload": (("llama-2-7b", "a100-80gb", 1, 4096, 32), {},
                {"optimizer on the CPU", "recomputes"}),
    # transformers' guide to DeepSpeed: ZeRO-1 is the fastest of what fits, ZeRO-3 the slowest; and that
    # of training on many GPUs: between slow nodes rather ZeRO-1. Of the same checkpointing: with it 32 sequences of
    # stage 3 hide its exchange, as these times have it.
    "slow": (("gpt2-xl", "a100-40gb", 16, 1024, 512, SLOW_NETWORK),
             {"engines": (Engine.DEEPSPEED,), "checkpointing": ("none",)},
             {"weights whole", "layers whole", "optimizer on the GPU"}),
    "zero-1": (("gpt2-xl", "a100-40gb", 16, 1024, 512), {"engines": (Engine.DEEPSPEED,)},
               {"weights whole", "keeps activations"}),
}  # fmt: skip


@pytest.mark.parametrize("case", PRACTICE)
def test_what_practitioners_choose_comes_first(case: str) -> None:
    job, goal, expected = PRACTICE[case]
    found = timed_plan(*job, limit=1, **goal)  # type: ignore[arg-type]
    (best,) = found.setups
    assert best.time is not None
    assert expected <= traits(best.setup)


def test_what_comes_first_does_so_however_many_are_asked_for() -> None:
    for engine in (Engine.DEEPSPEED, Engine.FSDP):
        job: tuple[Any, ...] = ("gpt2-xl", "a100-40gb", 16, 1024, 512)
        (first,) = timed_plan(*job, limit=1, engines=(engine,)).setups
        best = timed_plan(*job, engines=(engine,)).setups[0]
        assert (first.setup, first.time) == (best.setup, best.time)


def test_the_fastest_comes_first() -> None:
    found = timed_plan("gpt2-xl", "a100-40gb", 16, 1024, 512, engines=(Engine.DEEPSPEED,))
    speeds = [each.time.tokens_per_s for each in found.setups if each.time]
    assert len(speeds) == len(found.setups) > 3
    assert all(slower <= faster * 1.03 for faster, slower in pairwise(speeds))


def test_the_cheapest_is_not_the_fastest_where_more_gpus_scale_badly() -> None:
    """With a batch too small for 64 GPUs, 8 of them train for less money and longer."""
    job: tuple[Any, ...] = ("gpt2-xl", "a100-40gb", (8, 64), 1024, 64, TimeQuestion(prices=2.0))
    fast = timed_plan(*job, objective="speed", engines=(Engine.DEEPSPEED,)).setups[0]
    cheap = timed_plan(*job, objective="cost", engines=(Engine.DEEPSPEED,)).setups[0]
    few = timed_plan(*job, objective="gpus", engines=(Engine.DEEPSPEED,)).setups[0]
    assert fast.time
    assert cheap.time
    assert few.time
    assert (fast.time.num_gpus, cheap.time.num_gpus, few.time.num_gpus) == (64, 8, 8)
    assert cheap.time.tokens_per_s_per_gpu > fast.time.tokens_per_s_per_gpu


def test_the_front_trades_memory_for_time() -> None:
    found = timed_plan("gpt2-xl", "a100-40gb", 16, 1024, 512, engines=(Engine.DEEPSPEED,))
    front = memory_front(found.setups)
    assert len(front) > 1
    for faster, leaner in pairwise(front):
        assert faster.time
        assert leaner.time
        assert faster.time.tokens_per_s > leaner.time.tokens_per_s
        assert faster.estimate.total_bytes.high > leaner.estimate.total_bytes.high
    for each in found.setups:
        assert each.time
        assert any(
            other.time
            and other.time.tokens_per_s * 1.02 >= each.time.tokens_per_s
            and other.estimate.total_bytes.high <= each.estimate.total_bytes.high
            for other in front
        )


def test_rows_have_the_times() -> None:
    found = timed_plan("gpt2", "a100-40gb", 8, 1024, 480, engines=(Engine.DDP,))
    row, time = next(iter(plan_rows(found, TimeQuestion()))), found.setups[0].time
    assert time
    assert row["step_s"] == pytest.approx(time.expected_s, rel=4e-6)
    told = {"step_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "hfu"}
    assert told <= set(markdown_columns(TimeQuestion())) <= set(row)


def test_without_the_question_nothing_is_timed() -> None:
    goal = Goal(num_gpus=(8,), base=TrainingSetup(seq_len=512), limit=3)
    assert all(each.time is None for each in plan(load_model("gpt2"), goal, load_gpu("t4")).setups)


@pytest.mark.parametrize("wrong", [{"mfu": 1.5}, {"tokens": 1, "examples": 1}])
def test_questions_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TimeQuestion(**wrong)


def test_the_front_gives_up_no_more_than_the_first() -> None:
    """Optimizer states in 16 bits are no trade of memory for time."""
    job = Goal(num_gpus=(8, 16), base=TrainingSetup(seq_len=2048), engines=(Engine.FSDP,), limit=20)
    found = plan(load_model("llama-3.1-8b"), job, load_gpu("h100"), times=TimeQuestion())
    assert {each.tier for each in found.setups} == {0, 1}
    assert {each.tier for each in found.front} == {0}


def test_a_plan_says_what_more_gpus_change() -> None:
    question = TimeQuestion(tokens=10**9, prices=2.5)
    goal = Goal(num_gpus=(8, 16), base=TrainingSetup(seq_len=2048), engines=(Engine.FSDP,), limit=3)
    found = plan(load_model("gpt2"), goal, load_gpu("h100"), times=question)
    few, many, change = run_lines(found, question)
    assert few.startswith("8 GPUs, ")
    assert many.startswith("16 GPUs, ")
    assert re.match(
        r"16 in place of 8 GPUs: .* sooner \(\d\.\d+ times as fast\), .*GPU-hours, cost [+-]",
        change,
    )


def test_what_has_one_copy_of_the_model_is_tried_once() -> None:
    """Ways to share out states differ in nothing where there is nobody to share with."""
    goal = Goal(
        num_gpus=(8,), base=TrainingSetup(seq_len=1024), engines=(Engine.FSDP,),
        tensor_parallel=(8,), limit=20,
    )  # fmt: skip
    found = plan(load_model("llama-3.2-1b"), goal, load_gpu("h100"))
    told = [
        (setup_label(each.setup), each.setup.chosen_precision, str(each.setup.checkpointing))
        for each in found.setups
    ]
    assert len(told) == len(set(told)) > 1


def test_every_number_of_gpus_is_timed() -> None:
    """However many numbers there are: a plan tells the best of each."""
    counts = tuple(range(8, 264, 8))
    goal = Goal(
        num_gpus=counts, base=TrainingSetup(seq_len=1024), engines=(Engine.FSDP,), limit=len(counts),
        checkpointing=("full",),
    )  # fmt: skip
    found = plan(load_model("gpt2"), goal, load_gpu("a100-80gb"), times=TimeQuestion())
    assert {each.setup.num_gpus for each in found.setups} == set(counts)
    assert all(each.time is not None for each in found.setups)


def test_memory_against_time_is_drawn() -> None:
    found = timed_plan("gpt2-xl", "a100-40gb", 16, 1024, 512, engines=(Engine.DEEPSPEED,))
    drawing = front_picture(found).svg
    ElementTree.fromstring(drawing)
    assert drawing.count('<circle class="mp-long"') == len(found.front)
    assert drawing.count("<circle") == len({each.setup for each in (*found.setups, *found.front)})
    page = front_page(found, version="1.2")
    assert drawing in page
    tables = page.split("<tbody>")[1:]  # the one behind the drawing, and that of every figure
    for each in tables:
        rows = each.partition("</tbody>")[0]
        assert rows.count("<tr>") == len({each.setup for each in (*found.setups, *found.front)})
        assert rows.count("<td>*</td>") == len(found.front)
    assert len(tables) == 2
