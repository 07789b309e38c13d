"""A model's shape, as data: what its operations are made from.

A ``ModelSpec`` is put together from parts that families share: how its tokens are embedded, one or
two stacks of layers, each layer's attention and feed-forward network, the norms around them, and
the head that the task needs. A family's reader (``memplan.families``) fills the parts in from
a config; the blocks of ``memplan.graph`` write the operations.

Names are those of Hugging Face's configs: ``hidden_size``, ``num_heads``
(``num_attention_heads``), ``num_kv_heads`` (``num_key_value_heads``), ``intermediate_size``.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from memplan.dtypes import DType
from memplan.fast_dataclass import HashedOnce, dataclass
from memplan.model.heads import Task
from memplan.upward import Displayed, provided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.model.config import ConfigReader
    from memplan.model.denoisers import DenoiserSpec
    from memplan.model.heads import HeadSpec
    from memplan.model.joining import TowerJoin
    from memplan.model.layers import StackSpec
    from memplan.model.pictures import PictureSpec
    from memplan.model.sounds import SoundSpec
    from memplan.model.traced import TracedModule

__all__ = ["ModelSpec", "Task", "Tying"]


class Tying(Enum):
    """Whether the file and transformers agree on sharing input and output matrices."""

    CLEAR = "clear"
    AMBIGUOUS = "ambiguous"
    """transformers ties what the published checkpoint holds twice (flan-T5, mT5)."""


class Blueprint(Protocol):
    """A model's class, which a layer above knows (``memplan.classes``)."""

    @property
    def layers(self) -> tuple[tuple[int, ...], ...] | None:
        """Which of the config's layers are there; None: all."""

    def reader(self) -> ConfigReader:
        """The config, to be read key by key."""

    def record(self, model: ModelSpec, options: Any) -> Any:
        """Write the class's training step on a new tape."""

    def sizes(self, model: ModelSpec) -> tuple[tuple[int, ...], ...]:
        """The shapes of the class's parameters, of each kind of layer once, and how many of each kind its lists hold."""

    def with_layers(self, *stacks: Sequence[int]) -> Blueprint:
        """The same with these of its layers, counted from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec(Displayed, HashedOnce):
    """A model, complete: everything that decides its operations and parameters."""

    name: str
    family: str
    """transformers' ``model_type``."""
    task: Task
    vocab_size: int
    hidden_size: int
    context_length: int
    """Positions the model was made for, without offsets [tokens]."""
    stacks: tuple[StackSpec, ...]
    """One stack, or the encoder and then the decoder."""
    head: HeadSpec
    num_labels: int = 2
    """Classes of a classification head."""
    tying: Tying = Tying.CLEAR
    checkpoint_dtype: DType = DType.FP32
    """What the config says the published weights are held in."""
    transposed_linear: bool = False
    """Its layers' matrices are in transformers' ``Conv1D`` modules, which are no ``torch.nn.Linear``."""
    recomputes: bool = True
    """The class can checkpoint its activations."""
    eager_attention_only: bool = False
    """The class has no other attention than the one written out in Python."""
    layerdrop: tuple[tuple[str, float], ...] = ()
    """The chance with which a step leaves a layer out, by what the name of its stack has in it."""
    without_sdpa: bool = False
    """The class cannot be asked for torch's ``scaled_dot_product_attention``."""
    without_flash: bool = False
    """Nor, or apart from that, for the flash-attention package."""
    declares_fp32: bool = False
    """The class makes a weight in fp32 whatever format it is built or loaded in, and then raises."""
    without_autocast: bool = False
    """The class raises under autocast."""
    join: TowerJoin | None = None
    """Where its towers meet the stack; None: it has none, or they have no operations."""
    activations_left_out: str = ""
    """What of the activations is not in the figures, in words; empty when all of them are."""
    traced: TracedModule | None = None
    """A user's own module as ``memplan.trace`` wrote it down: then it has no stacks."""
    quantization: tuple[tuple[str, object], ...] = ()
    """The config's ``quantization_config``, key by key: how the checkpoint holds linear layers."""
    assumptions: tuple[str, ...] = ()
    """What of the shape is not the config's own word, and which keys that change memory were not
    read: ``num_hidden_layers 32: not in the config, LlamaConfig's default``. None for built-ins."""
    blueprint: Blueprint | None = None
    """The class that it is written as; None: it is written down from this spec."""
    denoiser: DenoiserSpec | None = None
    """What a diffusion transformer takes noise away from; None of any other model."""
    picture: PictureSpec | None = None
    """What an image model that is written as a class sees; None of any other."""
    sound: SoundSpec | None = None
    """What a model of sound that is written as a class hears; None of any other."""
    source: str = ""
    """Where the shape was read: a file, a hub id or ``built-in``."""

    @property
    def num_layers(self) -> int:
        """Layers of all stacks, or of a diffusion transformer's or a traced module's lists."""
        if self.traced is not None:
            return self.traced.num_layers
        if self.denoiser is not None:
            return self.denoiser.num_layers
        sensed = self.picture or self.sound
        if sensed is not None and not self.stacks:
            return sensed.num_layers
        return sum(stack.num_layers for stack in self.stacks)

    @property
    def has_towers(self) -> bool:
        """Whether something that sees, hears or speaks stands beside its stacks."""
        return self.join is not None

    @property
    def denoises(self) -> bool:
        """Whether it is a diffusion transformer."""
        return self.denoiser is not None

    @property
    def num_params(self) -> int:
        """All parameters with the task's head, shared ones once; counted anew at each call.

        >>> import memplan
        >>> memplan.load_model("t5-3b").num_params
        2851598336
        """
        count: int = provided("num_params", self)
        return count

    def __repr__(self) -> str:
        return (
            f"ModelSpec({self.name}, {self.family} for {self.task.value}: {self.num_layers} layers, "
            f"hidden size {self.hidden_size})"
        )

    @property
    def num_outputs(self) -> int:
        """Logits of a token."""
        return self.head.num_rows or self.vocab_size
