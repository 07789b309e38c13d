from memplan.estimator import estimate
from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import SegmentComponent
from memplan.graph.model import record_model
from memplan.memory.required import RunSource
from memplan.model.parameters import ModelPart
from memplan.sources.models import load_model
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def test_each_segment_says_what_it_is_to_the_model() -> None:
    segments = record_model(load_model("t5-3b"), TapeOptions()).segments
    assert [segment.part for segment in segments] == [
        ModelPart.EMBEDDING, ModelPart.LAYERS, ModelPart.LAYERS, ModelPart.NORM,
        ModelPart.EMBEDDING, ModelPart.LAYERS, ModelPart.LAYERS, ModelPart.NORM, ModelPart.HEAD,
    ]  # fmt: skip
    losses = [segment.part is ModelPart.HEAD for segment in segments]
    assert [each.component is SegmentComponent.LOGITS_AND_LOSS for each in segments] == losses


def test_a_layer_knows_what_it_writes_down() -> None:
    model = load_model("llama-3.2-1b")
    segments = record_model(model, TapeOptions()).segments
    layers = [segment.layer for segment in segments if segment.is_layer]
    assert layers == [run.layer for run in model.stacks[0].runs]
    assert all(segment.layer is None for segment in segments if not segment.is_layer)


def test_a_tape_stays_as_it_is_when_another_one_is_made_of_its_class() -> None:
    # A stage's class keeps what it hands on by name until the next tape is made of it.
    model = load_model("qwen3-vl-2b")
    setup = TrainingSetup(
        num_gpus=4, pipeline_parallel=4, gradient_accumulation_steps=8, engine=Engine.FSDP,
        seq_len=1024, images_per_sample=1,
    )  # fmt: skip
    source = estimate(model, setup).run_source
    assert isinstance(source, RunSource)
    stages = source.record().stages

    def released() -> list[list[int]]:
        return [[len(each.releases) for each in stage.tape.segments] for stage in stages]

    before = released()
    estimate(model, replace(setup, micro_batch_size=2))
    assert released() == before
