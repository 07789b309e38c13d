"""Classes that others put in the place of a model's own, as their packages do it.

Liger's ``apply_liger_kernel_to_llama`` and Unsloth's patches replace norms, networks and functions of
transformers' modules; ALST's ``TiledMLP`` stands around a network.
"""

from memplan.classes.llama import MLP, GatedMLP, GateUpMLP
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.feed_forward import fused_gate
from memplan.graph.modules.basic import FusedRMSNorm, RMSNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Site, become, with_methods
from memplan.training.choices_of_kernels.kernels import (
    FITTING_TILES,
    WHOLE,
    ExpertKernel,
    FeedForwardKernel,
    Kernels,
    NormKernel,
    ScanKernel,
)
from memplan.units import ceil_div


class FusedGate(GatedMLP):
    """Liger's ``LigerSwiGLUMLP``: one kernel between the projections."""

    def gated(self, x: Handle) -> Handle:
        """It keeps gate and up, and writes their gradients over them."""
        return multiplied(self.gate_proj(x), self.up_proj(x))


class FusedHalves(GateUpMLP):
    """Liger's ``LigerPhi3SwiGLUMLP``: the same, where gate and up are one matrix."""

    def multiplied(self, gate: Handle, up_states: Handle) -> Handle:
        """Both halves are copied into rows first."""
        return multiplied(gate, up_states)


def multiplied(gate: Handle, up: Handle) -> Handle:
    """``LigerSiLUMulFunction`` and its like."""
    return gate.like(fused_gate(gate.run, gate.record, up.record))


class TiledMLP(Module):
    """A network over tiles of its input, forward and again in backward."""

    def __init__(self, network: Module) -> None:
        self.network = network

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """The network keeps its name."""
        self.site, self.path, self.within = site, path, within
        return self.network.attach(site, path, within)

    def forward(self, x: Handle) -> Handle:
        """One operation, whatever the network runs."""
        from memplan.graph.tiles import run_in_tiles  # only for tiles

        run, width = self.run, x.shape[-1]
        count = run.kernels.mlp_tiles
        if count == FITTING_TILES:
            count = ceil_div(run.options.seq_len, width)

        def network(tile: Tensor) -> Tensor:
            with run.inside_tile():
                made: Handle = self.network(Handle(run, tile, (tile.numel // width, width)))
                return made.record

        record = run_in_tiles(
            run, OperationKind.TILED_NETWORK, x.record, width, count, network, joined=True
        )
        return Handle(run, record, x.shape)


def replace_classes(model: Module, kernels: Kernels, *, spread: bool) -> None:
    """Put the classes of the chosen kernels in the place of the model's own.

    Experts are ``spread`` where ranks have different ones.
    """
    if spread or kernels.experts is ExpertKernel.MODULES:
        _replace_experts(model, spread=spread)
    if kernels.scan is ScanKernel.PACKAGE:
        from memplan.classes.recurrent.kernels import replace_scans  # only where installed

        replace_scans(model)
    fused_norms = kernels.norm is not NormKernel.EAGER
    fused_networks = kernels.feed_forward is FeedForwardKernel.FUSED
    for _, module in list(model.modules()):
        if fused_norms and isinstance(module, RMSNorm):
            become(module, FusedRMSNorm)
        for own, replaced in NETWORKS.items():
            if fused_networks and isinstance(module, own):
                become(module, with_methods(replaced, type(module)))
    if kernels.mlp_tiles != WHOLE:
        for layer in _layers(model):
            for name, each in list(layer.children.items()):
                if isinstance(each, MLP):
                    setattr(layer, name, TiledMLP(each))


def _replace_experts(model: Module, *, spread: bool) -> None:
    from memplan.classes.mixed.dispatch import routed  # only for such experts
    from memplan.classes.mixed.experts import ExpertModules, Experts

    made = routed if spread else ExpertModules
    for _, module in list(model.modules()):
        for name, each in list(module.children.items()):
            if isinstance(each, Experts) and (spread or each.as_modules):
                setattr(module, name, made(each))


def _layers(model: Module) -> list[Module]:
    lists = [each for _, each in model.modules() if isinstance(each, LayerList)]
    return [layer for each in lists for layer in each.made.values()]


NETWORKS: dict[type[Module], type[Module]] = {GatedMLP: FusedGate, GateUpMLP: FusedHalves}
"""What stands in the place of a network's own steps."""
