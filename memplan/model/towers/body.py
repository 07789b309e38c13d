"""Any of the bodies, and several in a row."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass
from memplan.model.towers.contrast import ContrastBody
from memplan.model.towers.convolved import ConvolvedBody
from memplan.model.towers.layers import LayerBody
from memplan.model.towers.parts import PartBody
from memplan.model.towers.patches import PictureBody
from memplan.model.towers.pooling import PoolingBody
from memplan.model.towers.projecting import ProjectingBody
from memplan.model.towers.sounds import SoundBody
from memplan.model.towers.texts import OutputBody, TextBody


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainBody:
    """Several of these in one module, one behind the other."""

    parts: tuple[TowerBody, ...]


TowerBody = (
    ChainBody
    | PartBody
    | PictureBody
    | TextBody
    | LayerBody
    | ConvolvedBody
    | SoundBody
    | PoolingBody
    | ContrastBody
    | ProjectingBody
    | OutputBody
)
