"""Bounds are bounds, and a search that stops early finds what looking at everything finds."""

from dataclasses import replace
from typing import Any

import pytest

from memplan.estimator import Estimate, estimate, walked_bytes
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.planning.best_first import BestFirst, _Known
from memplan.search.planning.degrees import (
    AskedDegrees,
    Degrees,
    check_degrees,
    degrees_of,
    every_degree,
    may_split,
)
from memplan.search.planning.floors import (
    activations_floor,
    in_flight_share,
    resident_floor,
    states_floor,
    waiting_floor,
)
from memplan.search.planning.goal import Goal
from memplan.search.planning.planner import Planner, plan
from memplan.search.planning.sizes import ModelSizes, model_sizes
from memplan.search.planning.space import losses
from memplan.search.planning.speed import bubble_share, setup_speed
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.choices import Offload, ZeroStage
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import PipelineSchedule

MODEL = load_model("llama-3.2-1b")
SIZES = model_sizes(MODEL)
H100 = load_gpu("h100")
SETUPS: list[Any] = [
    pytest.param({"engine": "ddp"}, id="DDP"),
    pytest.param({"zero_stage": 1, "checkpointing": "full"}, id="stage 1"),
    pytest.param({"zero_stage": 2, "micro_batch_size": 3}, id="stage 2"),
    pytest.param({"zero_stage": 3, "num_gpus": 64}, id="stage 3"),
    pytest.param({"zero_stage": 2, "offload_optimizer": "cpu"}, id="offloaded"),
    pytest.param({"engine": "fsdp", "checkpointing": "full"}, id="FSDP2"),
    pytest.param({"engine": "fsdp", "fsdp_strategy": "shard_grad_op"}, id="gathered"),
    pytest.param({"engine": "fsdp", "precision": "bf16", "checkpointing": 0.5}, id="16 bits"),
    pytest.param(
        {"engine": "fsdp", "tensor_parallel": 4, "sequence_parallel": True, "checkpointing": "full"},
        id="TP",
    ),
    pytest.param({"tensor_parallel": 8, "engine": "ddp"}, id="TP alone"),
    pytest.param(
        {"engine": "megatron", "tensor_parallel": 2, "sequence_parallel": True,
         "engine_options": {"use_distributed_optimizer": True}},
        id="Megatron",
    ),
    pytest.param({"engine": "fsdp", "context_parallel": 4, "checkpointing": "full"}, id="CP"),
]  # fmt: skip


@pytest.mark.parametrize("fields", SETUPS)
def test_floors_are_below_what_is_held(fields: dict[str, Any]) -> None:
    setup = TrainingSetup(**{"num_gpus": 8, "seq_len": 1024, **fields}).resolve()
    answer = estimate(MODEL, setup, H100)
    states, handed_on = states_floor(setup, SIZES), activations_floor(setup, SIZES)
    layers, most = walked_bytes(MODEL, setup, H100)
    assert 0 < handed_on <= layers <= most
    assert max(states, resident_floor(setup, SIZES) + most) <= answer.worst_bytes
    assert states > 0.15 * answer.held_bytes  # a floor that says something


LOOPED = {"pipeline_schedule": "interleaved-1f1b", "gradient_accumulation_steps": 12}
PIPELINES: list[Any] = [
    pytest.param({"engine": "ddp", "gradient_accumulation_steps": 12}, id="DDP"),
    pytest.param({"engine": "ddp", "pipeline_schedule": "gpipe"}, id="GPipe"),
    pytest.param({"engine": "fsdp", "tensor_parallel": 2, "sequence_parallel": True}, id="FSDP2 x TP"),
    pytest.param({"engine": "fsdp", "virtual_stages": 2, **LOOPED}, id="looped"),
    pytest.param({"engine": "fsdp", "virtual_stages": 4, **LOOPED}, id="more stages than are gathered"),
    pytest.param({"engine": "deepspeed", "zero_stage": 1, "checkpointing": "none"}, id="DeepSpeed"),
    pytest.param({"engine": "megatron", "checkpointing": "none", "virtual_stages": 2, **LOOPED}, id="Megatron"),
]  # fmt: skip


@pytest.mark.parametrize("fields", PIPELINES)
def test_floors_of_pipelines_are_below_what_is_held(fields: dict[str, Any]) -> None:
    fields = {
        "num_gpus": 8, "seq_len": 1024, "pipeline_parallel": 4, "gradient_accumulation_steps": 8,
        "checkpointing": "full", **fields,
    }  # fmt: skip
    setup = TrainingSetup(**fields).resolve(MODEL.context_length)
    answer = estimate(MODEL, setup, H100)
    least = BestFirst(Goal(), MODEL, H100, SIZES).at_least(setup)
    assert 0.15 * answer.peak_bytes < least <= answer.peak_bytes


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("fields", SETUPS)
def test_two_walks_bound_every_larger_batch(fields: dict[str, Any], size: int) -> None:
    """What does not grow with the batch, as a head's gathered weights, is counted once."""
    setup = TrainingSetup(**{"num_gpus": 8, "seq_len": 1024, **fields, "micro_batch_size": size})
    setup = setup.resolve(MODEL.context_length)
    search = BestFirst(Goal(), MODEL, H100, SIZES)
    least = search._needed(setup, _Known.WALK)
    assert 0.5 * search.at_least(setup) < least <= 1.0001 * search.at_least(setup)
    assert search.at_least(setup) <= estimate(MODEL, setup, H100).peak_bytes


def test_gradients_that_wait_are_part_of_the_floor() -> None:
    fields: dict[str, Any] = {"num_gpus": 8, "engine": "fsdp", "seq_len": 1024}
    options = {"sync_each_batch": False}
    setup = TrainingSetup(**fields, gradient_accumulation_steps=4, engine_options=options).resolve()
    waiting = waiting_floor(setup, SIZES)
    assert waiting == 4 * SIZES.num_params
    least = BestFirst(Goal(), MODEL, H100, SIZES).at_least(setup)
    assert waiting < least <= estimate(MODEL, setup, H100).peak_bytes


def test_what_cannot_fit_is_seldom_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 180 ways to split 70B over 16 GPUs, few of which fit."""
    asked = []

    def counting(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec) -> Estimate:
        asked.append(setup)
        return estimate(model, setup, gpu)

    monkeypatch.setattr("memplan.search.planning.sizing.estimate", counting)
    goal = Goal(
        num_gpus=16, base=TrainingSetup(seq_len=8192), engines=("fsdp", "ddp"), precisions="bf16",  # type: ignore[arg-type]
        global_batch_size=1024,
    )  # fmt: skip
    told = plan(load_model("llama-3.1-70b"), goal, H100).setups
    assert len(asked) <= 35
    # The fastest by far flush the cache in every step, which is told and not in their speed.
    assert not any(each.flushes for each in told)


def test_nothing_is_known_of_what_is_not_plain_training() -> None:
    setup = TrainingSetup(num_gpus=8, optimizer="sgd")  # type: ignore[arg-type]
    assert states_floor(setup, SIZES) == 0


def test_the_first_found_is_the_best_of_all() -> None:
    """On eight GPUs everything can be looked at; with the loss named, no other kernels are."""
    goal = Goal(
        num_gpus=8, base=TrainingSetup(seq_len=2048, loss="eager"), engines=("fsdp", "ddp"), limit=3,  # type: ignore[arg-type]
        tensor_parallel=(1, 2, 4, 8), pipeline_parallel=1, context_parallel=1,  # type: ignore[arg-type]
    )  # fmt: skip
    model = load_model("llama-3.1-8b")
    found = plan(model, goal, H100)
    everything = Planner(model, replace(goal, limit=100), H100)
    for loss in losses(goal):
        everything._try_all(8, [Degrees(), Degrees(2), Degrees(4), Degrees(8)], loss)
    ranked = everything._settled()
    assert [each.setup for each in found.setups] == [each.setup for each in ranked[:3]]


def test_an_unsplit_model_that_is_beaten_is_not_played_out() -> None:
    """What is told is; of the rest it is enough that it surely fits with a smaller micro-batch."""
    goal = Goal(num_gpus=64, base=TrainingSetup(seq_len=2048), limit=1)  # type: ignore[arg-type]
    planner = Planner(load_model("llama-3.1-70b"), goal, H100)
    (told,) = planner.run().setups
    assert degrees_of(told.setup) != Degrees()
    left = [each for each in planner.found if id(each.estimate) in planner.finder.open]
    unsplit = [each for each in left if degrees_of(each.setup) == Degrees()]
    assert unsplit
    assert all(planner._surely_fits_some(each) for each in unsplit[:1])


def test_every_number_of_gpus_is_told_by_its_best() -> None:
    found = plan(MODEL, Goal(num_gpus=(8, 16, 32), base=TrainingSetup(seq_len=512), limit=4), H100)
    assert {each.setup.num_gpus for each in found.setups} == {8, 16, 32}
    assert len(found.setups) == 4


def test_degrees_are_divisors_and_layers_are_split_inside_a_node() -> None:
    sizes = model_sizes(load_model("mixtral-8x7b"))
    base = TrainingSetup(seq_len=16384)
    found = list(every_degree(AskedDegrees(), base, 96, sizes))
    assert found[0] == Degrees()
    assert len(set(found)) == len(found)
    for each in found:
        assert 96 % (each.tensor * each.pipeline * each.context) == 0
        assert each.tensor <= 8
        assert 16384 // each.context >= 4096
        assert sizes.num_experts % each.expert == 0
        assert each.virtual == 1 or 32 % (each.pipeline * each.virtual) == 0
    assert {each.expert for each in found} == {1, 2, 4, 8}
    assert 3 not in {each.pipeline for each in found}  # divides GPUs, but not layers
    assert all(
        each.context == 1 for each in every_degree(AskedDegrees(), TrainingSetup(), 8, sizes)
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        pytest.param({"pipeline": (32,)}, "32 stages are more than the 16 layers", id="stages"),
        pytest.param({"expert": (8,)}, "no experts", id="experts"),
        pytest.param({"tensor": (4,), "pipeline": (4,)}, "= 4 x 4 x 1 = 16", id="product"),
        pytest.param(
            {"virtual": (3,), "pipeline": (4,)}, "3 stages .* do not divide", id="virtual"
        ),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_the_arithmetic(
    asked: dict[str, Any], message: str
) -> None:
    from memplan.errors import SetupError

    with pytest.raises(SetupError, match=message):
        check_degrees(AskedDegrees(**asked), (8,), SIZES, MODEL.name)


def test_virtual_stages_that_divide_the_layers_are_taken() -> None:
    check_degrees(AskedDegrees(virtual=(2,), pipeline=(4,)), (8,), SIZES, MODEL.name)


def test_who_splits_how() -> None:
    assert may_split(Engine.DDP, Degrees(tensor=2, pipeline=4), 8)
    assert not may_split(Engine.DDP, Degrees(pipeline=4), 8)
    assert may_split(Engine.DEEPSPEED, Degrees(), 8)
    assert not may_split(Engine.DEEPSPEED, Degrees(pipeline=2), 8)
    assert may_split(Engine.FSDP, Degrees(tensor=2, pipeline=2), 8)


def test_a_pipeline_idles_less_with_more_micro_batches_and_stages() -> None:
    def bubble(schedule: PipelineSchedule, **fields: Any) -> float:
        steps = {"gradient_accumulation_steps": 16, **fields}
        return bubble_share(
            TrainingSetup(num_gpus=8, pipeline_parallel=4, pipeline_schedule=schedule, **steps)
        )

    plain = PipelineSchedule.ONE_F_ONE_B
    assert bubble(plain, gradient_accumulation_steps=4) == pytest.approx(3 / 4)
    assert bubble(plain) == pytest.approx(3 / 16)
    looped = PipelineSchedule.INTERLEAVED_ONE_F_ONE_B
    assert bubble(looped, virtual_stages=2) == pytest.approx(3 / 32)
    assert bubble(PipelineSchedule.ZBV, virtual_stages=2) == 0
    assert in_flight_share(TrainingSetup(num_gpus=8), 32) == 1


def test_what_split_models_send_counts() -> None:
    mixture = load_model("mixtral-8x7b")
    sizes: ModelSizes = model_sizes(mixture)

    def speed(**fields: Any) -> float:
        setup = TrainingSetup(num_gpus=64, engine="fsdp", seq_len=8192, **fields)  # type: ignore[arg-type]
        found = setup_speed(setup, mixture, H100, sizes, trainable_params=sizes.num_params)
        return found.communication

    assert speed(expert_parallel=8) > 0
    assert speed(expert_parallel=64) > speed(expert_parallel=8)  # beyond the node
    assert speed(tensor_parallel=8) > speed(tensor_parallel=2) > 0


@pytest.mark.parametrize("gpus_per_node", [8, 4])
def test_candidates_that_are_made_full_are_what_filling_in_makes_of_them(
    gpus_per_node: int,
) -> None:
    goal = Goal(num_gpus=8, gpus_per_node=gpus_per_node)
    space, loss = Planner(MODEL, goal, H100).space, losses(goal)[0]
    degrees = [Degrees(tensor=2), Degrees(pipeline=2), Degrees(context=2, pipeline=2)]
    plain = list(space.candidates(8, degrees, loss))
    full = list(space.candidates(8, degrees, loss, is_full=True))
    assert len(plain) > 20
    resolved = [each.setup.resolve(MODEL.context_length) for each in plain]
    assert [each.setup for each in full] == resolved
    assert all(each.setup.resolve(MODEL.context_length) is each.setup for each in full)


def test_whether_nodes_hold_what_is_offloaded_is_asked_on_the_fewest_gpus_alone() -> None:
    """Where weights alone are beyond the card: with more GPUs a node holds no more."""
    model = load_model("llama-3.1-70b")
    goal = Goal(num_gpus=(8, 16, 32), zero_stages=(ZeroStage.GRADIENTS,))
    planner = Planner(model, goal, H100)
    asked: list[int] = []
    ask = planner.sizing._ask

    def counted(setup: TrainingSetup, size: int) -> Estimate:
        asked.extend([setup.num_gpus] * (setup.offload_optimizer is Offload.CPU))
        return ask(setup, size)

    planner.sizing._ask = counted  # type: ignore[method-assign]
    found = planner.run()
    assert asked == [8]
    offloaded = [each for each in found.shortfalls if each.setup.offload_optimizer is Offload.CPU]
    assert {each.setup.num_gpus for each in offloaded} == {8, 16, 32}
