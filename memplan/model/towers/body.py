"""Any of the bodies, several in a row, and branches that meet again."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass
from memplan.model.towers.compared.pooling import PoolingBody
from memplan.model.towers.compared.projecting import ProjectingBody
from memplan.model.towers.compared.queried import QueriedBody
from memplan.model.towers.gridded.davit import DavitBody
from memplan.model.towers.gridded.nets import NetBody
from memplan.model.towers.gridded.segmenting import SegmentingBody
from memplan.model.towers.layers import LayerBody
from memplan.model.towers.pairs import PairBody
from memplan.model.towers.parts import PartBody
from memplan.model.towers.patches import PatchesBody
from memplan.model.towers.sounds import SoundBody
from memplan.model.towers.texts import OutputBody
from memplan.model.towers.tiles import TileBody, TilesBody


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainBody:
    """Several of these in one module, one behind the other."""

    parts: tuple[TowerBody, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallBody:
    """Several of these in a module of their own: what they read lives until it returns, as names in its frame do."""

    parts: tuple[TowerBody, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualBody:
    """A branch and what goes past it, added."""

    branch: tuple[TowerBody, ...]
    dropout: float = 0.0


BranchBody = CallBody | ResidualBody

TowerBody = (
    ChainBody
    | BranchBody
    | PartBody
    | PatchesBody
    | TilesBody
    | TileBody
    | LayerBody
    | NetBody
    | SoundBody
    | SegmentingBody
    | PoolingBody
    | ProjectingBody
    | PairBody
    | DavitBody
    | QueriedBody
    | OutputBody
)
