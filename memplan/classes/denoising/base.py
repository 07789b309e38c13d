"""Diffusion transformers: what every one of them is given, hands its layers, and is trained for.

Text encoders and the autoencoder are no part of the model: the training scripts compute prompts'
embeddings and latents before, or let frozen models do so outside the graph. The loss is the mean square
of what the model gives less what the flow's direction is (diffusers 0.42, ``train_dreambooth_flux.py``).
"""

from math import prod
from typing import Any, ClassVar

from memplan.classes.base import Base
from memplan.classes.heads import Task, finish
from memplan.dtypes import DType
from memplan.graph.core.tensors import Storage, Tensor, allocated_bytes
from memplan.graph.denoisers.sizes import latent_size
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Site, Weight
from memplan.graph.modules.run import Run
from memplan.graph.operations.convolutions import convolve
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.denoisers import LatentGrid
from memplan.model.heads import Task as TaskKind
from memplan.model.parameters import ModelPart

SCALE = 8
"""Pixels of a latent, down and across, of the autoencoders that these models have."""
LATENTS_IN_LOOP = 4
"""Variables of the training loop beside what the model is given: latents, noise, the loss's target and,
of the step before, what the model gave."""


class Sample:
    """The batch of a step: noised latents, and embeddings of prompts that were computed before."""

    def __init__(self, run: Run, grid: LatentGrid) -> None:
        self.run = run
        self.batch, self.prompt_tokens = run.options.batch_size, run.options.seq_len
        self.size = latent_size(run.options, grid)
        self.dtype = run.autocast or run.compute
        """What the training scripts hold latents and embeddings in (``weight_dtype``)."""

    def take(self, *shape: int, dtype: DType | None = None) -> Handle:
        """A tensor of the batch, which is there before the step and counted with it."""
        return Handle(self.run, from_batch(self.run, prod(shape), dtype or self.dtype), shape)

    def latents(self) -> Handle:
        """Noised latents, as tokens of as many numbers; behind them what is known of the clip."""
        grid, tokens = self.size.grid, self.size.tokens
        features = grid.features
        if not grid.beside:
            return self.take(self.batch, tokens, features)
        known = features // grid.channels * grid.beside
        self.take(self.batch, tokens, features)
        self.take(self.batch, tokens, known)
        return self.take(self.batch, tokens, features + known)

    def prompt(self, width: int) -> Handle:
        """Embeddings of the prompts' tokens."""
        return self.take(self.batch, self.prompt_tokens, width)


class DenoisingStep(Task):
    """The model by itself, and the loss that the training scripts make of what it gives."""

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """There is nothing around it."""
        super().attach(site, path, within)
        return self.base.attach(site, path, within)

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        """One micro-batch of the loop."""
        del batch, length, received
        base = self.base
        assert isinstance(base, Denoiser)
        sample = Sample(self.run, base.grid)
        for _ in range(LATENTS_IN_LOOP + base.packed):
            sample.take(sample.batch, sample.size.numel)
        finish(self, weighted_square(base(sample), sample))


class Denoiser(Base):
    """A model that is given noised latents, a prompt's embeddings and a time."""

    prefix = "transformer"
    speaks = classifies = classifies_tokens = False
    tasks: ClassVar[Any] = {TaskKind.OTHER: DenoisingStep, TaskKind.BASE: DenoisingStep}
    grid: LatentGrid
    size: int
    """Width of its layers."""
    prompt: int
    """Tokens of a prompt where nobody says how many."""
    packed = False
    """Latents are packed by the training script, which is a copy."""

    @property
    def num_layers(self) -> int:
        """Layers of all its lists."""
        return sum(len(each.kinds) for _, each in self.modules() if isinstance(each, LayerList))

    def number_layers(self) -> None:
        """Count layers through all its lists, as checkpointing does."""
        before, total = 0, self.num_layers
        for _, each in self.modules():
            if isinstance(each, LayerList):
                each.before, each.depth = before, total
                before += len(each.kinds)

    def begin_head(self, x: Handle) -> None:
        """What stands behind its layers begins."""
        self.run.start("head", x.record, part=ModelPart.HEAD, frozen=self.is_frozen(ModelPart.HEAD))


def heads_of(config: ConfigReader) -> tuple[int, int]:
    """The width of the layers, and how many heads share it."""
    heads = config.integer("num_attention_heads")
    return heads * config.integer("attention_head_dim"), heads


def refuse(config: ConfigReader, *unknown: tuple[str, str]) -> None:
    """Refuse a config that sets one of these keys.

    Raises ``ConfigError`` with the words beside it.
    """
    for key, words in unknown:
        if config.raw(key):
            raise config.fail(key, words)


class ModuleList(Module):
    """``torch.nn.ModuleList``, of which the modules at some places own weights."""

    def __init__(self, places: dict[int, Module]) -> None:
        for number, each in places.items():
            setattr(self, str(number), each)

    def __getitem__(self, number: int) -> Any:
        return self.children[str(number)]


class PatchEmbedding(Module):
    """A convolution whose stride is its kernel: what it gives is seen token by token."""

    def __init__(self, channels: int, size: int, *patch: int, bias: bool = True) -> None:
        self.size = size
        self.weight = Weight(size, channels, *patch)
        if bias:
            self.bias = Weight(size)

    def forward(self, x: Handle) -> Handle:
        """One kernel; ``x`` is counted in tokens already."""
        batch, tokens, _ = x.shape
        bias = self.parameter(self.weights["bias"]) if "bias" in self.weights else None
        weight = self.parameter(self.weight)
        made = convolve(x.run, x.record, weight, bias, batch * tokens, self.size)
        return Handle(x.run, made, (batch, tokens, self.size), (tokens * self.size, 1, tokens))


def chunked(x: Handle, count: int, *, dim: int = -1) -> list[Handle]:
    """``x.chunk(count)``: vectors that are spread over tokens, so that their gradients are summed back."""
    found = x.split(*(x.shape[dim] // count,) * count, dim=dim)
    for each in found:
        each.record.by_column = True
    return found


def unpatched(tokens: Handle) -> Handle:
    """Tokens laid out as latents again: a copy."""
    made = Handle(tokens.run, tokens.run.contiguous(tokens.record), tokens.shape)
    return tokens.leads_to(made, in_rows(tokens.shape))


def weighted_square(given: Handle, sample: Sample) -> Tensor:
    """The weighted mean square of what the model gave less the flow's direction, in fp32."""
    run, shape = sample.run, given.shape
    given = given.float()
    target = _of_loop(sample, *shape).float()
    error = given - target
    weighting = _of_loop(sample, sample.batch, 1, 1).float()
    weighted = weighting * error.pow(2)
    each = run.mean(weighted.record, weighted.numel // sample.batch)
    return run.mean(each, each.numel)


def _of_loop(sample: Sample, *shape: int) -> Handle:
    """A variable of the training loop, counted with the batch already."""
    numel = prod(shape)
    storage = Storage(allocated_bytes(numel, sample.dtype), -1, 0)
    return Handle(sample.run, Tensor(numel, sample.dtype, storage), shape)
