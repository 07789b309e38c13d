"""What the tape asks of an adapter that is laid over a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from memplan.graph.core.splits import Split
    from memplan.graph.core.tensors import Parameter, Tensor
    from memplan.training.splitting.parallelism import TensorParallel

BASE_LAYER = ".base_layer"
"""What an adapted module is called within the one that takes its place."""
ORIGINAL = ".original_module"
"""What a module is called of which a copy is trained, within peft's ``ModulesToSaveWrapper``."""
Ranks = Mapping[str, int]
"""Modules of one layer, in the tape's words, and the rank of each one's adapter; single weights too."""
_WEIGHT_MARK = ":"


def weight_key(module: str, name: str) -> str:
    """What a weight that has an adapter of its own is called among ``Ranks``."""
    return f"{module}{_WEIGHT_MARK}{name}"


def adapted_weights(ranks: Ranks, module: str) -> list[str]:
    """The keys of a module's weights that have adapters of their own, as they are declared."""
    return [each for each in ranks if each.startswith(f"{module}{_WEIGHT_MARK}")]


def adapter_module(ranks: Ranks, key: str) -> str:
    """The module that owns an adapter: of several on weights of one, each stands around those before.

    >>> ranks = {"experts:gate_up_proj": 32, "experts:down_proj": 16, "q_proj": 16}
    >>> adapter_module(ranks, "experts:gate_up_proj"), adapter_module(ranks, "q_proj")
    ('experts.base_layer', 'q_proj')
    """
    module, mark, _ = key.partition(_WEIGHT_MARK)
    if not mark:
        return module
    around = adapted_weights(ranks, module)
    return module + BASE_LAYER * (len(around) - 1 - around.index(key))


def bare_module(module: str) -> str:
    """A module's name without what adapters around it add."""
    while module.endswith(BASE_LAYER):
        module = module.removesuffix(BASE_LAYER)
    return module


class Overlay(Protocol):
    """An adapter over a model, whose own weights are frozen.

    Segments go by their name, and by how often segments of that name were repeated before.
    """

    @property
    def num_prompts(self) -> int:
        """Trained tokens before every sequence."""

    def prompted(self, t: Any, x: "Tensor") -> "Tensor":
        """Set them before looked-up tokens."""

    def at(self, name: str, repetition: int) -> Ranks:
        """What is adapted in one repetition."""

    def saves(self, name: str, repetition: int, module: str) -> bool:
        """Whether a copy of a module, or of one that it is in, is trained."""

    def trains_bias(self, module: str, ranks: Ranks) -> bool:
        """Whether a module's own bias is trained."""

    def cuts(self, name: str) -> set[int]:
        """Numbers of repetitions that are not adapted as the one before."""

    def beside_linear(
        self,
        t: Any,
        x: "Tensor",
        out: "Tensor",
        weight: "Parameter",
        bias: "Parameter | None",
        module: str,
    ) -> "Tensor":
        """Record on tape ``t`` what an adapted linear layer does with its result."""

    def beside_share(
        self,
        t: Any,
        group: "TensorParallel",
        x: "Tensor",
        out: "Tensor",
        weight: "Parameter",
        module: str,
        *,
        split: "Split",
    ) -> "Tensor":
        """Record the same of a rank's share of a layer."""

    def before_linear(self, t: Any, x: "Tensor", width: int, module: str) -> "Tensor":
        """Record what an adapted linear layer does with its input."""

    def in_place_of(self, t: Any, weight: "Parameter") -> "Tensor":
        """Record what is multiplied by in a weight's place: its sum with its own adapter's product."""

    def beside_embedding(
        self, t: Any, out: "Tensor", weight: "Parameter", ids: "Tensor | None", module: str
    ) -> "Tensor":
        """Record what an adapted embedding does with its result."""

    def declare(self, t: Any, weight: "Parameter", module: str) -> None:
        """Declare the adapter of a module that is counted, not written down."""

    def declare_on_weight(self, t: Any, weight: "Parameter") -> None:
        """Declare the adapter that stands on such a weight itself, where there is one."""
