"""Retrievers: a language model that sees, whose tokens a linear layer makes short vectors of.

(transformers 5.23, models/colpali/modeling_colpali.py, models/colqwen2/modeling_colqwen2.py)
"""

from typing import ClassVar

from memplan.classes.heads import BaseModel, ForRetrieval
from memplan.classes.joined.base import TOWER, JoinedModel
from memplan.classes.joined.plain import PaliGemmaModel
from memplan.classes.joined.qwen_vl import Qwen2VLModel
from memplan.classes.pictures.base import begin_tower
from memplan.families.nesting import PartSpec, read_part, unknown_part
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.spec import ModelSpec


class Retriever(JoinedModel):
    """A base model inside a config of its own; nothing tells its tokens apart."""

    prefix = "vlm"
    tasks: ClassVar[dict[Task, type]] = {Task.OTHER: ForRetrieval, Task.BASE: BaseModel}
    inside: ClassVar[PartSpec]
    """The model's config."""
    alike: ClassVar[tuple[str, ...]] = ()
    """Other types that are the same class."""

    def __init__(self, config: ConfigReader) -> None:
        part = read_part(config, self.inside)
        known = self.inside.model_type, *self.alike
        if part.model_type not in known:
            raise unknown_part(part, dict.fromkeys(known))
        super().__init__(part.reader)
        self.words.block_masks = False
        self.vector_size = config.integer("embedding_dim")

    def told(self, model: ModelSpec, task: Task | None) -> ModelSpec:
        """The class checkpoints nothing."""
        is_base = task is Task.BASE
        return replace(
            model,
            task=Task.BASE if is_base else Task.OTHER,
            head=replace(model.head, tied=False, vector_size=0 if is_base else self.vector_size),
            recomputes=model.recomputes and is_base,
        )

    def pictures(self) -> Handle:
        """Cast; the class's own variable holds the copy."""
        given = super().pictures()
        pixel_values = given.to(self.run.compute)
        if pixel_values is not given:
            self.run.cache(pixel_values.record)
        return pixel_values


class ColPaliModel(Retriever, PaliGemmaModel):
    inside = PartSpec(key="vlm_config", model_type="paligemma")


class ColQwen2Model(Retriever, Qwen2VLModel):
    """It calls the tower itself, with the patches that do not pad."""

    inside = PartSpec(key="vlm_config", model_type="qwen2_vl")
    alike = ("qwen2_5_vl",)

    def pictures(self) -> Handle:
        given = JoinedModel.pictures(self)
        pixel_values = made_from(OperationKind.INDEX, given.shape, given.dtype, given)
        self.run.cache(pixel_values.record)
        return pixel_values

    def get_image_features(self) -> Handle:
        begin_tower(self.eye, TOWER)
        image_features: Handle = self.eye(self.pictures())[1]
        return image_features

    def collected(self, image_features: Handle) -> Handle:
        return image_features
