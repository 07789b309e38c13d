"""What language models that see have in common: their parts, and placeholders that features are written over.

(transformers 5.23: ``get_image_features``, ``get_placeholder_mask`` and ``forward`` of each ``modeling_*.py``)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from memplan.classes.base import Base
from memplan.classes.pictures.base import PictureModel, as_tower, begin, begin_tower
from memplan.classes.registry import CLASSES, TOWERS, base_class, class_at
from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.families.nesting import EMPTY, Part, PartSpec, read_part, same_class, unknown_part
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import Embedding, spare_alone
from memplan.graph.modules.functional import masked_scatter
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.run import Run
from memplan.graph.towers.joining import MERGE
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.joining import Joining
from memplan.model.parameters import ModelPart, owner_of
from memplan.model.pictures import PictureSpec
from memplan.model.sounds import SoundSpec
from memplan.model.spec import ModelSpec

VISION = "vision_config"
TOWER = "vision_tower"
"""How names of a tower's segments begin, whatever the class calls it."""
PROJECTOR = "projector"
"""The segment of what leads from a tower to the text, whatever modules that has."""


class JoinedModel(Base):
    """Towers, a projector, and a text model whose placeholders stand for what is seen."""

    is_joined = True
    text: ClassVar[PartSpec] = PartSpec(key="text_config", model_type="llama")
    """Its config."""
    called = "language_model"
    """What the class calls it."""
    sees = "vision_tower"
    """What the class calls its tower."""
    nested_ties = False
    """A nested ``tie_word_embeddings`` that is true overrules the outer one."""
    plain_logits = False
    """It leaves logits as they are, though the text model's own class casts them."""
    joining = Joining.SCATTERED
    returns_features = True
    """The class returns what was written over the embeddings (``image_hidden_states``), so that it stays."""
    unseen: tuple[str, ...] = ()
    """Parts that nothing runs through when a picture is shown."""
    picture: PictureSpec
    sound: SoundSpec | None = None
    """Its clips, where it hears."""
    part: Part
    """The text's config."""

    @classmethod
    def named_task(cls, config: ConfigReader, model: ModelSpec) -> type[Any] | None:
        """That of the text's class."""
        if cls.tasks:
            return cls.tasks.get(model.task)
        part = read_text(config, cls.text)
        kind = base_class(part.model_type)
        return kind.named_task(part.reader, model) or kind.tasks.get(model.task)

    # --- parts, in the order of the class's constructor -------------------------------------------------

    def add_text(self, config: ConfigReader) -> None:
        """The text's class."""
        self.part = read_text(config, self.text)
        made = base_class(self.part.model_type)(self.part.reader)
        made.joiner = self.seen
        setattr(self, self.called, made)

    def text_width(self, config: ConfigReader) -> int:
        """Of the text's embeddings."""
        return read_text(config, self.text).reader.integer("hidden_size")

    def add_tower(
        self, config: ConfigReader, kind: str = "", fills: Mapping[str, object] = EMPTY
    ) -> PictureModel:
        """The tower that pictures go through."""
        made = made_tower(config, TOWER, kind, fills)
        setattr(self, self.sees, made)
        self.picture = made.picture
        return made

    def show(self, crops: int) -> None:
        """Each picture comes in so many crops."""
        self.picture = self.eye.picture = replace(self.picture, crops=crops)

    @property
    def words(self) -> Any:
        """The text model."""
        return self.children[self.called]

    text_part = words

    @property
    def eye(self) -> PictureModel:
        """The tower."""
        found = self.children[self.sees]
        assert isinstance(found, PictureModel)
        return found

    @property
    def token_table(self) -> Embedding | None:
        """The text model's."""
        found: Embedding | None = self.words.token_table
        return found

    def owners(self) -> tuple[str, ...]:
        """Parts of it that can be frozen whole."""
        found = (owner_of(self.segment_of(name)) for name in self.children)
        return tuple(dict.fromkeys(name for name in found if name))

    def segment_of(self, child: str) -> str:
        """How the names of a part's segments begin."""
        if child == self.called:
            return ""
        return getattr(self.children[child], "tower", PROJECTOR)

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:
        """The outer config says so; where the text's keys stand in it, its flag is the outer one's alone."""
        del tied
        inner = self.part.reader
        if inner.config is config.config:
            inner = same_class(inner, {})
        is_tied = config.flag("tie_word_embeddings")
        return is_tied or (self.nested_ties and inner.flag("tie_word_embeddings"))

    def output_rows(self, config: ConfigReader) -> int:
        """Of an untied output matrix; 0: the text's vocabulary."""
        del config
        return 0

    def told(self, model: ModelSpec, task: TaskKind | None) -> ModelSpec:  # noqa: ARG002
        """What others read of it, where the class changes it for a task that is asked for."""
        return model

    def keep_logits(self) -> None:
        """As the text model."""
        self.words.keep_logits()

    # --- the passes ----------------------------------------------------------------------------------------

    def forward(self, *given: Any) -> Any:
        """The text model, whose embeddings are written over (``seen``)."""
        self.named: list[object] = []
        made = self.words(*given)
        self.named.clear()
        return made

    def declare_unseen(self) -> None:
        """What no picture goes through; all that sees, where none is shown."""
        for name, each in self.children.items():
            if name in self.unseen or (each is not self.words and not self.is_shown):
                spare_segments(each, self.segment_of(name))
        if self.weights and not self.is_shown:
            self.run.begin(PROJECTOR, frozen=self.is_frozen(ModelPart.OTHER, PROJECTOR))
            spare_alone(self)
            self.run.end(self.run.tensor(0, DType.FP32))

    @property
    def is_shown(self) -> bool:
        """Whether samples have pictures."""
        return self.run.options.images_per_sample > 0 and self.joining is not Joining.UNSEEN

    def seen(self, inputs_embeds: Handle) -> tuple[Handle, ...]:
        """The embeddings, with features in the place of placeholders."""
        if not self.is_shown:
            return (inputs_embeds,)
        run = self.run
        run.finish(inputs_embeds.record)
        image_features = self.get_image_features()
        self.named.append(image_features)
        begin(self, MERGE, ModelPart.OTHER, image_features)
        image_features = self.collected(image_features)
        self.check_room(image_features)
        image_features = image_features.to(inputs_embeds.dtype)
        if self.returns_features:
            run.cache(image_features.record)
        self.named.append(image_features)
        special_image_mask = made_by(run, OperationKind.EQ, inputs_embeds.shape[:2], DType.BOOL)
        return (masked_scatter(inputs_embeds, special_image_mask, image_features),)

    def get_image_features(self) -> Handle:
        """What is written over the placeholders, of (pictures, tokens, width) or in one row."""
        raise NotImplementedError

    def collected(self, image_features: Handle) -> Handle:
        """``torch.cat(image_features, dim=0)`` of a list of them, where the class makes one."""
        return image_features

    def pictures(self) -> Handle:
        """What the tower is given."""
        return self.eye.pixels()

    def outputs(self, pixel_values: Handle | None = None) -> tuple[Handle, ...]:
        """What the tower returns, which the class's own frame names until the text model has returned."""
        begin_tower(self.eye, TOWER)
        made: tuple[Handle, ...] = self.eye(
            self.pictures() if pixel_values is None else pixel_values
        )
        self.named += made
        return made

    def look(self, pixel_values: Handle | None = None) -> tuple[Handle, dict[int, Handle]]:
        """The tower's last hidden state, and those that are captured, by their numbers; named as long."""
        run, tower = self.run, self.eye
        last_hidden_state, *_ = self.outputs(pixel_values)
        states: dict[int, Handle] = {}
        for each in tower.layer_lists:
            states |= each.take_states()
        self.named += states.values()
        if run.unread is not None:
            if run.segment.output is None:
                run.finish(last_hidden_state.record)
            self.named.append(run.unread)
            run.unread = None
        return last_hidden_state, states

    def begin_projector(self, given: Handle) -> None:
        """The tower is through."""
        begin(self, PROJECTOR, ModelPart.OTHER, given)

    def check_room(self, image_features: Handle) -> None:
        """Refuse pictures that a sequence has no room for."""
        options = self.run.options
        tokens = image_features.numel // image_features.shape[-1] // options.batch_size
        group, length = options.context_parallel, options.seq_len
        if group is not None and group.in_classes:
            # Which write over whole sequences, then take their shares.
            length *= group.degree
        # Of a single token there is no sequence: its parts are asked for, not what a step holds.
        if options.seq_len > 1 and tokens > length:
            msg = (
                f"seq_len: {length} tokens have no room for what the model sees or hears in a "
                f"sample, {tokens} tokens: a sequence is its text with these; give more, or images_per_sample "
                "or image_size less"
            )
            raise SetupError(msg)


class CollectedModel(JoinedModel):
    """Features come as a list of each picture's, which are joined to one tensor."""

    def collected(self, image_features: Handle) -> Handle:
        *pictures, width = image_features.shape
        if len(pictures) > 1:
            return concatenate(*image_features.unbind(0), dim=0)
        return concatenate(image_features.view(-1, width), dim=0)


def made_tower(
    config: ConfigReader,
    name: str,
    kind: str = "",
    fills: Mapping[str, object] = EMPTY,
    *,
    key: str = VISION,
) -> PictureModel:
    """The class of the tower that the config names; its segments' names begin with another one.

    Raises ``ConfigError`` for a type that is none.
    """
    part = read_part(config, PartSpec(key=key, model_type=kind, fills=fills))
    if part.model_type not in TOWERS:
        raise unknown_part(part, TOWERS)
    made = class_at(TOWERS[part.model_type])(part.reader)
    assert isinstance(made, PictureModel)
    as_tower(made, name)
    made.beside_text, made.reads_pooled = True, False
    return made


def read_text(config: ConfigReader, text: PartSpec) -> Part:
    """The text's config.

    Raises ``ConfigError`` for a type that has no class.
    """
    part = read_part(config, text)
    if part.model_type not in CLASSES:
        error = part.reader.fail(
            "model_type", f"{part.model_type!r}: no such text model can be read yet"
        )
        raise error
    return part


def idle(run: Run, modules: Sequence[Module]) -> Tensor:
    """Declare what nothing runs through."""
    for each in modules:
        spare_alone(each)
    return run.tensor(0, DType.FP32)


def spare_segments(
    module: Module, name: str, declare: Callable[[Run, Sequence[Module]], Tensor] = idle
) -> None:
    """Declare a part that nothing runs through: what stands before, between and behind its layers, and these."""
    run = module.run
    for modules in stretches(module):
        if isinstance(modules, LayerList):
            run.beginnings[modules.segment_name] = modules.beginning
            for turn in modules.runs():
                layer, part = modules.made[turn.kind], ModelPart.LAYERS
                run.begin(modules.segment_name, part=part, repeat=turn.count, frozen=turn.frozen)
                run.end(declare(run, [layer, *(each for _, each in layer.modules())]))
        elif any(each.weights for each in modules):
            segment = f"{name}.weights" if module.spans_segments else name
            run.begin(segment, frozen=module.is_frozen(ModelPart.OTHER, name.partition(".")[0]))
            run.end(declare(run, modules))


def stretches(module: Module) -> Iterator[LayerList | list[Module]]:
    """Its lists of layers, and the modules between these."""
    open_: list[Module] = [module]
    for each in _all(module):
        if isinstance(each, LayerList):
            yield open_
            yield each
            open_ = []
        else:
            open_.append(each)
    yield open_


def _all(module: Module) -> Iterator[Module]:
    for each in module.children.values():
        yield each
        if not isinstance(each, LayerList):
            yield from _all(each)


def base_task(task: TaskKind | None) -> TaskKind | None:
    """What of the text model is asked for: ``ForConditionalGeneration`` is said of any that towers feed."""
    return None if task in {TaskKind.SEQ2SEQ_LM, TaskKind.OTHER} else task
