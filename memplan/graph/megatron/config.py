"""What all of Megatron's modules are told: sizes of one rank, its group, its settings."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

from memplan.fast_dataclass import dataclass
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.graph.modules.module import Module, Weight
from memplan.graph.splitting.local_model import divided
from memplan.model.spec import ModelSpec
from memplan.training.splitting.context_parallel import ContextParallelKind
from memplan.training.splitting.megatron import MegatronLayers


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """One rank's view of a model (core/transformer/transformer_config.py)."""

    name: str
    """The model's, for messages."""
    settings: MegatronLayers
    hidden_size: int
    degree: int
    """Ranks of the tensor-parallel group."""
    sequence: bool
    """Between the split blocks each of them has a share of every sequence."""
    context: int
    """Ranks that share each sequence."""
    is_ring: bool
    """Keys and values go round among them (``cp_comm_type`` p2p), else heads are exchanged (a2a)."""
    experts: int
    """Ranks over which experts are spread."""
    expert_degree: int
    """Ranks over which each expert is split."""

    @classmethod
    def of(cls, model: ModelSpec, options: TapeOptions, settings: MegatronLayers) -> Self:
        """As the options say."""
        group, shared = options.tensor_parallel, options.context_parallel
        degree = 1 if group is None else group.degree
        return cls(
            name=model.name, settings=settings, hidden_size=model.hidden_size, degree=degree,
            sequence=group is not None and group.sequence, experts=options.expert_ranks,
            context=1 if shared is None else shared.degree, expert_degree=settings.expert_ranks(degree),
            is_ring=shared is not None and shared.kind is ContextParallelKind.RING,
        )  # fmt: skip

    def share(self, size: int, what: str, ranks: int | None = None) -> int:
        """A rank's share of a size.

        Raises ``SetupError`` where ranks cannot share it evenly.
        """
        ranks = self.degree if ranks is None else ranks
        return size if ranks == 1 else divided(size, ranks, what)


class Backend(NamedTuple):
    """Whose modules stand in each place (core/models/backends.py, ``BackendSpecProvider``)."""

    column: Callable[..., Any]
    """Products with columns, of what was normed elsewhere."""
    normed_column: Any
    """The same behind a norm, which may be part of it (``has_norm``)."""
    row: Callable[..., Any]
    """Attention's last product."""
    network_row: Callable[..., Any]
    """A network's last product."""
    core_attention: Callable[..., Any]
    attention: Callable[..., Any]
    network: Callable[..., Any]
    layer: Callable[..., Any]


class Part(Weight):
    """What a rank has of a weight: one of so many parts."""

    __slots__ = ("experts", "ranks")

    def __init__(self, *shape: int, ranks: int = 1, experts: ExpertShare | None = None) -> None:
        super().__init__(*shape)
        self.ranks, self.experts = ranks, experts


class MegatronModule(Module):
    """core/transformer/module.py."""

    def declare(self, name: str, weight: Weight) -> Parameter:
        """Put a rank's part of a weight on the tape."""
        assert isinstance(weight, Part)
        made = self.run.parameter(name, *weight.shape, experts=weight.experts)
        made.ranks = weight.ranks
        return made

    def declared(self, weight: Weight, parameter: Parameter) -> None:
        """Note what it is there, and how names in its segment begin."""
        run, owner = self.run, weight.owner
        assert owner is not None
        run.parameters[weight] = parameter
        run.beginnings.setdefault(run.segment.name, owner.path.removesuffix(owner.within))

    def register(self) -> None:
        """Declare all that it owns in the order of ``named_parameters()``, which is that of Megatron's buffers."""
        for each in (self, *(module for _, module in self.modules())):
            for weight in each.weights.values():
                if weight.owner is each:
                    each.parameter(weight)
