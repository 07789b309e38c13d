from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import SegmentComponent
from memplan.graph.model import record_model
from memplan.model.parameters import ModelPart
from memplan.sources.models import load_model


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
