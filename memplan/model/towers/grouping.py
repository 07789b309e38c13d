"""Patches that are merged into groups between stages (GroupViT)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenLayerBody:
    """A layer whose scores are written out, of heads that are copied to lie one by one."""

    size: int
    inner_size: int
    num_heads: int
    activation: Activation
    dropout: float = 0.0
    causal: bool = False
    output: str = "o_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsBeginBody:
    """Tokens of groups stand behind the patches; those of the stage before are added to them."""

    size: int
    count: int
    before: int
    """Of the stage before; 0: there were none."""
    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsAssignBody:
    """Each patch is given to a group, by chance and whole; a group is the sum of its patches."""

    size: int
    count: int
    """Tokens of groups."""
    outputs: int
    """Groups that are left."""
    num_heads: int
    tokens_size: int
    inner_size: int
    channels_size: int
    activation: Activation
    dropout: float = 0.0


GroupingBody = WrittenLayerBody | GroupsBeginBody | GroupsAssignBody
