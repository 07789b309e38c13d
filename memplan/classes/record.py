"""A model's class on a tape: built from its config, with what others put in the place of its parts."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from memplan.classes import heads
from memplan.classes.base import text_of, without_towers
from memplan.classes.heads import Task
from memplan.classes.registry import TASKS, base_class
from memplan.classes.stages import cut
from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.splits import Sharing, Split, SplitPlan
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.batch import input_blocks
from memplan.graph.modules.interpreter import undisturbed
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Site, become
from memplan.graph.modules.run import Run
from memplan.graph.modules.stages import receive
from memplan.graph.stacks import WHOLE_MODEL
from memplan.model.config import ConfigReader
from memplan.model.heads import WHOLE_SEQUENCES
from memplan.model.heads import Task as ModelTask
from memplan.model.layers import LayerSpec, StackSpec
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels, is_replacing
from memplan.training.splitting.parallelism import StagePlace

if TYPE_CHECKING:
    from memplan.classes.mixed.mixtures import MixtureBlock
    from memplan.graph.modules.handles import Handle


def record_class(model: ModelSpec, options: TapeOptions) -> Run:
    """Write the training step of a model's class on a new tape; of a pipeline's stage, that of its part."""
    if len(model.stacks) > 1 and model.task in {*WHOLE_SEQUENCES, ModelTask.QUESTION_ANSWERING}:
        # Classes of sequences and of answers read their source a second time.
        options = replace(options, target_seq_len=options.seq_len)
    with undisturbed():
        return _recorded(model, options)


def _recorded(model: ModelSpec, options: TapeOptions) -> Run:
    run = Run(options, source=model.source)
    if model.eager_attention_only and run.kernels.attention is AttentionKernel.SDPA:
        run.kernels = replace(run.kernels, attention=AttentionKernel.EAGER)
    group = options.tensor_parallel
    parts = None if group is None else (options.split_plan, group.sequence)
    spread = options.expert_parallel is not None
    built = _attached(model, run.kernels, parts, options.stage, spread=spread)
    built.site.run = run
    run.layers = {stack.name: _layers_of(stack) for stack in model.stacks}
    run.order = {weight: place for place, weight in enumerate(built.ordered)}
    built.base.declare_unseen()
    if model.stacks:
        run.inputs += input_blocks(run, model)
    _run(run, built, model)
    run.declared = declared_order(run, built)
    run.close()
    del built.site.run  # or the class would hold the tape
    return run


def _layers_of(stack: StackSpec) -> list[LayerSpec]:
    return [each.layer for each in stack.runs for _ in range(each.count)]


@lru_cache(maxsize=32)
def _attached(
    model: ModelSpec,
    kernels: Kernels,
    parts: tuple[SplitPlan, bool] | None,
    stage: StagePlace | None,
    *,
    spread: bool,
) -> Task:
    """The model's class with what others put in the place of its parts; one tape after another is made of it."""
    blueprint = model.blueprint
    assert blueprint is not None
    built = build(blueprint.reader(), model)
    if spread or is_replacing(kernels):
        from memplan.classes.replaced import replace_classes  # only for others' kernels

        replace_classes(built, kernels, spread=spread)
    if blueprint.layers is not None:
        lists = (each for _, each in text_of(built).modules() if isinstance(each, LayerList))
        for layers, numbers in zip(lists, blueprint.layers, strict=False):
            layers.kinds = [layers.kinds[number] for number in numbers]
    if parts is not None:
        plan, sequence = parts
        split_modules(built, plan, sequence=sequence, spread=spread)
    if stage is not None:
        cut(built, stage)
    built.attach(Site())
    built.ordered = tuple(built.named_parameters())
    return built


def build(config: ConfigReader, model: ModelSpec) -> Task:
    """The class of the model's task around that of its type."""
    base = base_class(config.model_type)
    named: type[Task] | None = base.named_task(config, model) or base.tasks.get(model.task)
    task: type[Task] = named or getattr(heads, TASKS[model.task])
    return task(config, model, base)


def _run(run: Run, built: Task, model: ModelSpec) -> None:
    stage, options = run.options.stage, run.options
    batch, length = options.batch_size, options.seq_len
    received: Handle | None = None
    if stage is None or stage.is_first:
        built.begin()
        run.enter(WHOLE_MODEL)
    else:
        received = receive(run, batch, length, model.hidden_size)
    if stage is None or stage.is_last:
        built(batch, length, received)
        return
    x: Handle = built.base(batch, length, received)
    if run.segment.output is None:  # a stage without layers
        run.finish(x.record)


def split_modules(model: Module, plan: SplitPlan, *, sequence: bool, spread: bool) -> None:
    """Give every module the share that a rank has of it, by its name in the plan of its class.

    Experts that are spread are sent a rank's own tokens (torchtitan 0.3.0, models/common/moe_sharding.py).
    """
    splits = {
        **dict.fromkeys(
            (
                "q_proj",
                "k_proj",
                "v_proj",
                "qkv_proj",
                "query_key_value",
                "c_attn",
                "q_b_proj",
                "kv_b_proj",
            ),
            plan.attention.columns,
        ),
        **dict.fromkeys(("o_proj", "out_proj", "dense"), plan.attention.rows),
        **network_splits(plan.network),
        "lm_head": Split.VOCABULARY,
        **dict.fromkeys(
            ("embed_tokens", "embed_in", "wte", "word_embeddings"),
            Split.WHOLE if plan.table is Sharing.WHOLE else Split.VOCABULARY,
        ),
    }
    for name, module in without_towers(model):
        module.split = splits.get(name, Split.WHOLE)
        if name == "kv_a_proj_with_mqa" and plan.attention is Sharing.SPLIT and not sequence:
            from memplan.classes.mixed.latent import SharedKeyLinear  # only for narrow vectors

            become(module, SharedKeyLinear)
        module.gathers = sequence and name in ("self_attn", "attention", "mlp")
    from memplan.classes.mixed.mixtures import MixtureBlock  # only where ranks split a model
    from memplan.classes.recurrent.mamba import Mixer

    for _, module in without_towers(model):
        if isinstance(module, Mixer):
            for each in module.children.values():
                each.split = plan.mixer.columns if isinstance(each, Linear) else Split.WHOLE
        if isinstance(module, MixtureBlock):
            module.gathers = sequence and not spread
            share_experts(module, Sharing.PARTIAL if sequence else plan.shared, spread=spread)


def share_experts(block: "MixtureBlock", sharing: Sharing, *, spread: bool) -> None:
    """Give the expert that every token passes its share; beside spread ones it gathers tokens by itself."""
    from memplan.classes.llama import GatedMLP  # it is there already

    for each in block.children.values():
        if isinstance(each, GatedMLP):
            each.gathers = spread
            for name, split in network_splits(Sharing.SPLIT if spread else sharing).items():
                if name in each.children:
                    each.children[name].split = split


def network_splits(sharing: Sharing) -> dict[str, Split]:
    """Of a network's layers, by name."""
    first = "gate_proj", "up_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", "fc1"
    last = "down_proj", "c_proj", "dense_4h_to_h", "fc2"
    return {**dict.fromkeys(first, sharing.columns), **dict.fromkeys(last, sharing.rows)}


def declared_order(run: Run, model: Task) -> tuple[tuple[str, ...], ...]:
    """The order of ``named_parameters()``, which is that of the constructors: stretches of names, each
    behind that of their segment, of which one may stand for several kinds of layers."""
    places = {
        id(parameter): segment for segment in run.segments for parameter in segment.parameters
    }
    stretches: list[tuple[str, list[list[str]]]] = []
    before = None
    for weight in model.ordered:
        parameter = run.parameters.get(weight)
        segment = None if parameter is None else places.get(id(parameter))
        if parameter is None or segment is None:
            continue
        if not stretches or stretches[-1][0] != segment.name:
            stretches.append((segment.name, []))
        kinds = stretches[-1][1]
        if segment is not before:
            kinds.append([])
            before = segment
        kinds[-1].append(parameter.name.replace(".base_layer", ""))
    return tuple((name, *merged(kinds)) for name, kinds in stretches)


def merged(kinds: Sequence[Sequence[str]]) -> list[str]:
    """The names of all sequences, each behind those that any of them has before it."""
    left, found = [list(each) for each in kinds], []
    while any(left):
        firsts = [each[0] for each in left if each]
        waiting = {name for each in left for name in each[1:]}
        name = next((each for each in firsts if each not in waiting), firsts[0])
        found.append(name)
        left = [[each for each in names if each != name] for names in left]
    return found
