"""A pipeline's stage on the tape: what it receives, its own layers, what it hands on.

The first one has the embedding, the last one what stands behind the layers, the head and the loss.
"""

from collections.abc import Sequence

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.model.joining import Joining
from memplan.model.layers import LayerRun, LayerSpec
from memplan.model.spec import ModelSpec, Task
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.splitting.parallelism import PipelineRuntime, StagePlace


def check_stages(model: ModelSpec, runtime: PipelineRuntime = PipelineRuntime.TORCH) -> None:
    """Refuse a model of which it is not modelled how it is cut into stages.

    Towers go with the embedding, which what they give is written over, under torch's schedules alone.
    Raises ``SetupError``.
    """
    if len(model.stacks) != 1 or model.task is not Task.CAUSAL_LM:
        _refuse(
            model, f"only decoders with a language model's head are, and this is {model.task.value}"
        )
    stack = model.stacks[0]
    spec = stack.embedding
    crossed = model.join is not None and model.join.joining is Joining.CROSSED
    if (
        stack.projected_out
        or crossed
        or (model.has_towers and runtime is not PipelineRuntime.TORCH)
    ):
        _refuse(model, "it has parts beside a decoder's layers")
    if stack.several_streams:
        _refuse(model, "its residual stream is several")
    if spec is None or spec.own_module or spec.patch_features:
        _refuse(model, "its embedding is more than a table of tokens")
    if model.head.router_loss:
        _refuse(model, "its loss is of the routers of all layers together")
    for run in stack.runs:
        if run.shared:
            _refuse(model, "its layers share their weights")
        if _reads_earlier_layer(run.layer):
            _refuse(model, "its layers read what an earlier one makes")


def _reads_earlier_layer(layer: LayerSpec) -> bool:
    attention = layer.attention
    return layer.cross_attention is not None or bool(getattr(attention, "shares", False))


def _refuse(model: ModelSpec, why: str) -> None:
    msg = (
        f"pipeline_parallel: is not modelled for {model.name} ({model.family}): {why}; the nearest that "
        "is: sharding it over all GPUs, engine='fsdp' or zero_stage=3"
    )
    raise SetupError(msg)


def stage_model(model: ModelSpec, layers: range, place: StagePlace) -> ModelSpec:
    """The model with a stage's layers alone; of a tied matrix the last stage has a copy, and towers are the first one's.

    >>> import memplan
    >>> llama = memplan.load_model("llama-3.1-8b")
    >>> stage_model(llama, range(8, 16), StagePlace(is_first=False, is_last=False)).num_layers
    8
    """
    stack = model.stacks[0]
    head = model.head
    if head.tied and not (place.is_first and place.is_last):
        head = replace(head, tied=False)
    cut = replace(stack, runs=_runs_within(stack.runs, layers))
    blueprint = None if model.blueprint is None else model.blueprint.with_layers(layers)
    if not place.is_first:  # what sees and hears goes with the embedding
        model = replace(model, join=None)
    return replace(model, stacks=(cut,), head=head, blueprint=blueprint)


def _runs_within(runs: Sequence[LayerRun], layers: range) -> tuple[LayerRun, ...]:
    found: list[LayerRun] = []
    start = 0
    for run in runs:
        count = min(start + run.count, layers.stop) - max(start, layers.start)
        if count > 0:
            found.append(replace(run, count=count))
        start += run.count
    return tuple(found)


def stage_options(
    options: TapeOptions, *, num_layers: int, layers: range, place: StagePlace
) -> TapeOptions:
    """The options as they are for a stage's layers, counted from its own first one."""
    if not place.is_first:
        options = _without_towers(options)
    return replace(
        options,
        stage=place,
        outputs_held=options.outputs_held or (place.is_last and place.runtime.holds_logits),
        checkpointed_layers=_checkpointed_within(options.checkpointed_layers, num_layers, layers),
    )


def _without_towers(options: TapeOptions) -> TapeOptions:
    """The options of a stage that neither sees nor hears."""
    freeze = replace(
        options.freeze, vision_tower=False, audio_tower=False, text_tower=False, projector=False
    )
    return replace(
        options,
        freeze=freeze,
        images_per_sample=1,
        image_size=None,
        audio_seconds=None,
    )


def _checkpointed_within(
    chosen: float | CheckpointedLayers, num_layers: int, layers: range
) -> float | CheckpointedLayers:
    """Which of a stage's layers are recomputed; a share of the model's is of its first ones."""
    if isinstance(chosen, float):
        if chosen in (0.0, 1.0):
            return chosen
        count = round(chosen * num_layers)
        ranges: tuple[tuple[int, int], ...] = ((0, count - 1),)
    else:
        ranges = chosen.ranges
    cut = [
        (max(low, layers.start) - layers.start, min(high, layers.stop - 1) - layers.start)
        for low, high in ranges
    ]
    inside = tuple((low, high) for low, high in cut if low <= high)
    if not inside:
        return 0.0
    return 1.0 if inside == ((0, len(layers) - 1),) else CheckpointedLayers(inside)
