from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator import Verdict, estimate
from memplan.memory.engine_options import loads_under_zero_init
from memplan.report.estimates.changes import describe_change, engine_label
from memplan.report.plans.answer import job_text
from memplan.report.plans.rows import plan_rows
from memplan.report.plans.shortfalls import shortfall_lines
from memplan.search.planning.concessions import Concession
from memplan.search.planning.finding import Finder
from memplan.search.planning.goal import Goal, Objective, Plan
from memplan.search.planning.planner import plan
from memplan.search.planning.sizes import model_sizes
from memplan.search.planning.speed import relative_speed
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.adapters import Lora
from memplan.training.choices import Recomputation, ZeroStage
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.precision import Engine, Precision, carried_precision
from memplan.training.setup import TrainingSetup
from memplan.units import GIB

pytestmark = pytest.mark.long

MODEL = load_model("llama-3.2-1b")
H100 = load_gpu("h100")
BASE = TrainingSetup(seq_len=2048)


def made(gpu: str = "h100", model: str = "llama-3.2-1b", **goal: Any) -> Plan:
    return _made(gpu, model, Goal(**{"base": BASE, "limit": 100, **goal}))


@cache
def _made(gpu: str, model: str, goal: Goal) -> Plan:
    """A plan, which several tests look at from their side."""
    return plan(load_model(model), goal, load_gpu(gpu))


def test_every_setup_fits_and_no_larger_micro_batch_does() -> None:
    found = made(num_gpus=(2, 8))
    assert found.setups
    for each in found.setups:
        answer = estimate(MODEL, each.setup, H100)
        assert answer.verdict is Verdict.FITS
        assert each.headroom_bytes == H100.capacity_bytes - answer.total_bytes.high >= 0
        larger = replace(each.setup, micro_batch_size=each.setup.micro_batch_size + 1)
        assert estimate(MODEL, larger, H100).verdict is not Verdict.FITS


def test_what_a_plan_says_is_what_an_estimate_says() -> None:
    """That a 4090 holds a LoRA of 8B is found, with the figures of an estimate."""
    adapted = TrainingSetup(adapter={"lora": 16}, engine="ddp")  # type: ignore[arg-type]
    goal = {"model": "llama-3-8b", "gpu": "4090", "num_gpus": (1,), "engines": ("ddp",)}
    found = made(**goal, base=adapted)
    assert found.setups
    for each in found.setups:
        alone = estimate(load_model("llama-3-8b"), each.setup, load_gpu("4090"))
        assert each.estimate.total_bytes == alone.total_bytes
        assert alone.verdict is Verdict.FITS


@pytest.mark.parametrize(("gpu", "num_gpus"), [("a100-40gb", 8), ("h100", 8), ("v100", 2)])
def test_a_change_that_would_make_it_fit_is_told_whole(gpu: str, num_gpus: int) -> None:
    found = made(gpu=gpu, model="llama-3.1-8b", num_gpus=(num_gpus,))
    lines = shortfall_lines(found)
    assert len(lines) > 1
    failing = {
        (engine_label(each.estimate.setup), each.estimate.setup.chosen_precision.value)
        for each in found.shortfalls
    }
    for each in found.shortfalls:
        assert each.better is not None
        before, after = each.estimate.setup, each.better.setup
        change = describe_change(before, after)
        if engine_label(before) != engine_label(after):
            assert engine_label(after) in change
        carried = carried_precision(before.chosen_precision, after.chosen_engine)
        assert (after.chosen_precision.value in change) == (after.chosen_precision is not carried)
    # What a line of the default precision tells of is of the default precision too.
    assert all(precision in "\n".join(lines) for _, precision in failing if precision != "bf16")


def test_the_global_batch_is_kept() -> None:
    found = made(num_gpus=(8, 16), global_batch_size=96)
    for each in found.setups:
        setup = each.setup
        steps = setup.gradient_accumulation_steps
        assert setup.micro_batch_size * steps * setup.data_parallel == 96


def test_a_model_without_a_stack_of_layers_is_planned_on_several_gpus() -> None:
    found = made(model="vit-base-patch16-224", num_gpus=(8,), base=TrainingSetup())
    assert {each.setup.pipeline_parallel for each in found.setups} == {1}


def test_a_global_batch_smaller_than_the_ranks_is_not_tried() -> None:
    """Unless layers are split: then fewer ranks see sequences of their own."""
    found = made(num_gpus=(8, 64), global_batch_size=32)
    unsplit = [
        each.setup for each in found.setups if each.setup.data_parallel == each.setup.num_gpus
    ]
    assert {each.num_gpus for each in unsplit} == {8}
    assert {each.setup.num_gpus for each in found.setups} == {8, 64}
    assert any("64 data-parallel ranks" in reason for reason in found.refused)
    with pytest.raises(SetupError, match="spread evenly"):
        made(
            num_gpus=(64,), global_batch_size=32, tensor_parallel=1, pipeline_parallel=1,
            context_parallel=1,
        )  # fmt: skip


def test_headroom_is_kept_free() -> None:
    limit = H100.capacity_bytes * 0.7
    found = made(num_gpus=(8,), headroom=0.3)
    assert all(each.estimate.total_bytes.high <= limit for each in found.setups)
    plain = made(num_gpus=(8,))
    assert found.setups[0].setup.micro_batch_size < plain.setups[0].setup.micro_batch_size


def test_fewest_gpus_first() -> None:
    found = made(num_gpus=(1, 2, 4), objective=Objective.GPUS)
    full = [each.setup.num_gpus for each in found.setups if each.tier == 0]
    assert full == sorted(full)
    assert full[0] == 1


def test_largest_batch_first() -> None:
    found = made(num_gpus=(2, 8), objective=Objective.BATCH, checkpointing=("none",))
    sizes = [
        each.setup.micro_batch_size * each.setup.data_parallel
        for each in found.setups
        if not each.tier
    ]
    assert len(sizes) > 10
    assert sizes == sorted(sizes, reverse=True)


def test_fastest_first_and_the_simplest_among_equals() -> None:
    found = [each for each in made(num_gpus=(8,)).setups if not each.tier]
    assert found[0].setup.checkpointing is Recomputation.NONE
    for better, worse in pairwise(found):
        equal = abs(better.total_speed / worse.total_speed - 1) < 1e-9
        assert better.total_speed > worse.total_speed / 1.021
        assert not equal or better.simplicity <= worse.simplicity


def test_setups_without_fp32_states_come_last() -> None:
    tiers = [each.tier for each in made(num_gpus=(8,)).setups]
    assert tiers == sorted(tiers)
    assert set(tiers) == {0, 1}


def test_offloading_is_for_what_does_not_fit_without() -> None:
    assert not any(
        "cpu" in each.setup.offload_optimizer.value for each in made(num_gpus=(8,)).setups
    )
    found = made("a100-40gb", "llama-3.1-8b", num_gpus=(2,))
    assert all(
        each.setup.offload_optimizer.value == "cpu" for each in found.setups if not each.tier
    )


def test_stage_3_is_loaded_inside_zero_init() -> None:
    found = made(num_gpus=(8,), engines=(Engine.DEEPSPEED,))
    sharded = [each for each in found.setups if each.setup.zero_stage is ZeroStage.PARAMETERS]
    assert sharded
    assert all(loads_under_zero_init(each.setup) for each in sharded)
    said = "ZeRO-3 loads under zero.Init (default)"
    assert all(said in each.estimate.assumptions for each in sharded)
    base = replace(BASE, engine_options={"zero_init": False})
    kept = plan(MODEL, Goal(base=base, engines=(Engine.DEEPSPEED,)), H100).setups
    assert not any(loads_under_zero_init(each.setup) for each in kept)


def test_an_old_gpu_is_planned_in_fp16() -> None:
    found = made("v100-32gb", num_gpus=(8,))
    assert found.setups
    assert all(each.setup.chosen_precision.value.startswith("fp16") for each in found.setups)


@pytest.mark.parametrize(
    ("goal", "engines", "precisions"),
    [
        pytest.param({"engines": (Engine.FSDP,)}, {"fsdp"}, {"bf16-mixed", "bf16"}, id="engine"),
        pytest.param(
            {"precisions": (Precision.BF16_MASTER,)}, {"deepspeed"}, {"bf16-master"}, id="precision"
        ),
    ],
)
def test_the_space_can_be_narrowed(
    goal: dict[str, Any], engines: set[str], precisions: set[str]
) -> None:
    found = made(num_gpus=(8,), **goal)
    assert {each.setup.chosen_engine.value for each in found.setups} == engines
    assert {each.setup.chosen_precision.value for each in found.setups} == precisions


def test_what_falls_short_names_what_fits() -> None:
    """Where the whole model fits, ways to split it that nobody asked for are none of it."""
    found = made("rtx-4090", "llama-3.2-3b", num_gpus=(2,))
    assert found.shortfalls
    assert all(
        each.setup.tensor_parallel * each.setup.pipeline_parallel == 1 for each in found.shortfalls
    )
    fitting = {replace(each.setup, micro_batch_size=1) for each in found.setups}
    for each in found.shortfalls:
        assert each.missing_bytes > 0
        assert each.better is not None
        assert each.better.verdict is Verdict.FITS
        assert replace(each.better.setup, micro_batch_size=1) in fitting
        assert each.saved_bytes >= each.missing_bytes


def test_nothing_fitting_is_an_answer() -> None:
    found = made("t4", "llama-3.1-405b", num_gpus=(8,))
    assert not found.setups
    assert all(each.better is None for each in found.shortfalls)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        pytest.param({"num_gpus": ()}, "at least one", id="no GPUs"),
        pytest.param({"num_gpus": (0,)}, "at least 1", id="zero GPUs"),
        pytest.param({"headroom": 5}, "5 % is 0.05", id="headroom"),
        pytest.param({"global_batch_size": 0}, "at least 1", id="batch"),
    ],
)
def test_a_bad_goal_is_refused(goal: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        Goal(**goal)


def test_a_mixture_computes_with_a_share_of_its_parameters() -> None:
    mixture = load_model("mixtral-8x7b")
    answer = estimate(mixture, TrainingSetup(seq_len=16))
    assert 12e9 < model_sizes(mixture).active_params < 14e9 < answer.num_params
    assert model_sizes(MODEL).active_params == estimate(MODEL, BASE).num_params


def test_the_least_is_given_up_that_makes_it_fit() -> None:
    narrow = TrainingSetup(seq_len=512)
    card = replace(load_gpu("4090"), torch_total_bytes=9 * 2**30)
    one = {"num_gpus": 1, "engines": "ddp", "base": narrow, "limit": 100}
    assert not plan(MODEL, Goal(**one), card).setups  # type: ignore[arg-type]
    allowed = plan(MODEL, Goal(**one, allow="lora"), card)  # type: ignore[arg-type]
    assert {each.given_up for each in allowed.setups} == {Concession.LORA}
    assert all(each.setup.adapter is not None for each in allowed.setups)
    assert Concession.NONE in {each.given_up for each in allowed.shortfalls}
    told = "".join(shortfall_lines(allowed))
    assert "LoRA" in told
    roomy = plan(MODEL, Goal(**one, allow="lora"), H100)  # type: ignore[arg-type]
    order = [list(Concession).index(each.given_up) for each in roomy.setups]
    assert order == sorted(order)
    assert order[0] == 0
    assert {row["given_up"] for row in plan_rows(roomy)} == {"none", "lora"}


def test_an_adapter_of_ones_own_stays() -> None:
    own = TrainingSetup(seq_len=512, adapter=Lora(rank=4, targets="all-linear"))
    found = made(num_gpus=1, engines="ddp", base=own, allow="lora")
    assert {each.setup.adapter for each in found.setups} == {own.adapter}


def test_a_base_in_four_bits_is_given_up_last() -> None:
    card = replace(load_gpu("4090"), torch_total_bytes=3 * 2**30)
    narrow = TrainingSetup(seq_len=512)
    found = plan(MODEL, Goal(num_gpus=1, engines="ddp", base=narrow, allow=("qlora", "lora")), card)
    assert {each.given_up for each in found.setups} == {Concession.QLORA}
    assert "a base in nf4" in "".join(shortfall_lines(found))
    assert job_text(found).startswith("1.24B parameters, 11.27M trained")  # as an estimate says it


def test_degrees_that_a_plan_may_split_layers_by() -> None:
    """FSDP2 and DeepSpeed split within their groups, a plain loop where one group is all."""
    goal = Goal(
        num_gpus=(8,), tensor_parallel=(1, 2, 8), objective=Objective.BATCH,
        checkpointing=("full",), limit=100, pipeline_parallel=1, context_parallel=1,  # type: ignore[arg-type]
    )  # fmt: skip
    found = plan(load_model("llama-3.1-8b"), goal, load_gpu("h100-80gb"))
    engines = {
        degree: {each.setup.chosen_engine for each in found.setups
                 if each.setup.tensor_parallel == degree}
        for degree in (1, 2, 8)
    }  # fmt: skip
    assert Engine.DEEPSPEED in engines[1]
    assert engines[2] == {Engine.FSDP, Engine.DEEPSPEED, Engine.MEGATRON}
    assert Engine.DDP in engines[8]
    assert Engine.DDP not in engines[2]
    for each in (each.setup for each in found.setups if each.setup.tensor_parallel > 1):
        assert each.sequence_parallel == (each.chosen_engine is not Engine.DEEPSPEED)
        assert each.loss_parallel == (each.chosen_engine in (Engine.FSDP, Engine.DDP))


def test_a_split_model_pays_for_its_sums() -> None:
    """The same tokens on as many GPUs: what is sent in every layer cannot hide."""
    model = load_model("llama-3.1-8b")
    alone, split = (
        estimate(model, TrainingSetup(num_gpus=8, engine="fsdp", tensor_parallel=degree,  # type: ignore[arg-type]
                                      micro_batch_size=degree), gpu=load_gpu("h100-80gb"))
        for degree in (1, 4)
    )  # fmt: skip
    params = model_sizes(model).active_params
    speeds = [relative_speed(each, active_params=params).per_gpu for each in (alone, split)]
    assert speeds[0] > speeds[1] > 0.5 * speeds[0]


@pytest.mark.parametrize("card", ["4090", "a10g", "l4", "3090"])
def test_qlora_on_one_card_comes_before_a_host_full_of_weights(card: str) -> None:
    """8B on 24 GB: full fine-tuning over FSDP2 takes 156 GiB of CPU RAM, and a step takes half a minute."""
    goal = Goal(num_gpus=1, base=TrainingSetup(seq_len=1024), allow=("qlora",))
    best = plan(load_model("llama-3-8b"), goal, load_gpu(card)).setups[0]
    assert best.given_up is Concession.QLORA
    assert not best.offloads
    assert best.estimate.verdict is Verdict.FITS


def test_a_usual_nodes_ram_is_what_offloading_has() -> None:
    """Of an RTX 4090 48 GB, unless a goal says otherwise."""
    model, card, base = load_model("llama-3-8b"), load_gpu("4090"), TrainingSetup(seq_len=512)
    assert card.node is not None
    usual = plan(model, Goal(num_gpus=1, base=base), card)
    assert not usual.setups
    assert usual.overfilling
    assert all(each.host_bytes > card.node.share_bytes(1) for each in usual.overfilling)
    roomy = plan(model, Goal(num_gpus=1, base=base, node_memory_bytes=256 * GIB), card)
    assert roomy.setups[0].offloads


def test_what_comes_first_does_not_flush_in_every_step() -> None:
    """A largest batch that fits only so gives way to a smaller one."""
    goal = Goal(num_gpus=1, base=TrainingSetup(seq_len=2048, kernels="liger"), engines="ddp")  # type: ignore[arg-type]
    found = plan(MODEL, goal, load_gpu("a100-40gb")).setups
    assert found
    for each in found:
        assert each.flushes == each.estimate.flushes_every_step
    larger = replace(found[0].setup, micro_batch_size=found[0].setup.micro_batch_size + 1)
    beyond = estimate(MODEL, larger, load_gpu("a100-40gb"))
    assert beyond.verdict is not Verdict.FITS or beyond.flushes_every_step


def test_numbers_of_gpus_that_are_no_whole_nodes_are_left_out() -> None:
    found = plan(MODEL, Goal(num_gpus=(1, 8, 9), engines="ddp", limit=2), load_gpu("a100"))
    assert {each.setup.num_gpus for each in found.setups} == {1, 8}
    assert any("9 GPUs" in reason for reason in found.refused)


def test_leaner_kernels_are_tried_where_the_code_base_has_them() -> None:
    found = plan(MODEL, Goal(num_gpus=1, engines="ddp"), load_gpu("a100-40gb"))
    assert any(each.setup.kernels is KernelPreset.LIGER for each in found.setups)
    gpt2 = plan(load_model("gpt2"), Goal(num_gpus=1, engines="ddp"), load_gpu("a100-40gb"))
    assert all(each.setup.kernels is KernelPreset.HF for each in gpt2.setups)


def test_layers_are_looked_for_of_a_model_that_is_far_too_large() -> None:
    goal = Goal(objective="layers", num_gpus=(2,), engines=("fsdp",), checkpointing=("full",))
    found = plan(load_model("llama-3.1-70b"), goal, load_gpu("a100-40gb")).setups
    on_cards = [each for each in found if not each.offloads]
    assert on_cards
    assert all(0 < each.estimate.model.num_layers < 80 for each in on_cards)


GLOBAL_BATCHES: tuple[dict[str, Any], ...] = (
    {"num_gpus": (2, 8), "global_batch_size": 64},
    {"gpu": "4090", "num_gpus": (1, 4), "global_batch_size": 32, "allow": ("lora",)},
    {"gpu": "v100", "num_gpus": (8,), "global_batch_size": 48, "engines": ("deepspeed", "fsdp")},
    {"gpu": "l4", "num_gpus": (4, 16), "global_batch_size": 128, "limit": 3},
)


@pytest.mark.parametrize("goal", GLOBAL_BATCHES)
def test_what_is_left_open_changes_no_plan(
    goal: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a global batch: sizes that are asked for only when it turns on them are those found at once."""
    asked = {**goal}
    gpu = load_gpu(asked.pop("gpu", "h100"))
    wanted = Goal(**{"base": BASE, **asked})
    left_open = plan(MODEL, wanted, gpu)
    monkeypatch.setattr(Finder, "_left_open", lambda *_, **__: None)
    at_once = plan(MODEL, wanted, gpu)
    assert plan_rows_of(left_open) == plan_rows_of(at_once)
    assert left_open.num_fitting == at_once.num_fitting
    assert [each.setup for each in left_open.shortfalls] == [
        each.setup for each in at_once.shortfalls
    ]


def plan_rows_of(found: Plan) -> list[dict[str, object]]:
    return list(plan_rows(found, None))
