"""Trained tokens before every sequence: prompt tuning and P-tuning (peft 0.21.2, ``peft_model.py``)."""

from typing import Any

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.overlay import Ranks
from memplan.graph.core.splits import Split
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.products import matmul_weight
from memplan.model.spec import ModelSpec
from memplan.training.adapters import PromptTuning
from memplan.training.splitting.parallelism import TensorParallel

_ENCODER = "prompt_encoder.default"


def prompts_of(model: ModelSpec, adapter: PromptTuning) -> "Prompts":
    """Trained tokens before a model's.

    Raises ``SetupError`` for one whose embeddings are more than a table of tokens.
    """
    embedding = model.stacks[0].embedding if len(model.stacks) == 1 else None
    if embedding is None or embedding.own_module:
        msg = (
            f"adapter: prompt: {model.name} is no decoder with plain token embeddings, and prompts are "
            "modelled for those alone: take lora"
        )
        raise SetupError(msg)
    return Prompts(adapter=adapter, width=embedding.embedding_size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompts:
    """The overlay of a model whose own modules stay as they are."""

    adapter: PromptTuning
    width: int
    """Of the token embeddings."""

    @property
    def num_prompts(self) -> int:
        """Trained tokens before every sequence."""
        return self.adapter.tokens

    def prompted(self, t: Tape, x: Tensor) -> Tensor:
        """Look them up for every sequence, cast them, and set them before the others."""
        adapter, width = self.adapter, self.width
        dtype = t.options.adapter_dtype
        table = t.parameter(
            f"{_ENCODER}.embedding.weight", adapter.tokens, width, dtype=dtype, of_adapter=True
        )
        found = embedding_lookup(t, table, adapter.tokens * t.options.batch_size)
        if adapter.hidden_size is not None:
            found = self._encoded(t, found, adapter.hidden_size)
        return t.concatenate(t.cast(found, x.dtype), x)

    def _encoded(self, t: Tape, x: Tensor, hidden: int) -> Tensor:
        """P-tuning's network: three linear layers, two ReLUs between them."""
        sizes = ((self.width, hidden), (hidden, hidden), (hidden, self.width))
        for number, (before, after) in enumerate(sizes):
            name = f"{_ENCODER}.mlp_head.{2 * number}"
            dtype = t.options.adapter_dtype
            weight = t.parameter(f"{name}.weight", after, before, dtype=dtype, of_adapter=True)
            bias = t.parameter(f"{name}.bias", after, dtype=dtype, of_adapter=True)
            x = matmul_weight(t, x, weight, bias)
            if number < len(sizes) - 1:
                x = t.elementwise(OperationKind.RELU, x)
        return x

    def at(self, name: str, repetition: int) -> Ranks:  # noqa: ARG002
        """No module is adapted."""
        return {}

    def saves(self, name: str, repetition: int, module: str) -> bool:  # noqa: ARG002
        """No module is copied."""
        return False

    def trains_bias(self, module: str, ranks: Ranks) -> bool:  # noqa: ARG002
        """No bias is trained."""
        return False

    def cuts(self, name: str) -> set[int]:  # noqa: ARG002
        """All layers are alike."""
        return set()

    def beside_linear(
        self,
        t: Any,  # noqa: ARG002
        x: Tensor,  # noqa: ARG002
        out: Tensor,
        weight: Parameter,  # noqa: ARG002
        bias: Parameter | None,  # noqa: ARG002
        module: str,  # noqa: ARG002
    ) -> Tensor:
        """Its result, as it is."""
        return out

    def beside_share(
        self,
        t: Any,  # noqa: ARG002
        group: TensorParallel,  # noqa: ARG002
        x: Tensor,  # noqa: ARG002
        out: Tensor,
        weight: Parameter,  # noqa: ARG002
        module: str,  # noqa: ARG002
        *,
        split: Split,  # noqa: ARG002
    ) -> Tensor:
        """Its result, as it is."""
        return out

    def before_linear(self, t: Any, x: Tensor, width: int, module: str) -> Tensor:  # noqa: ARG002
        """Its input, as it is."""
        return x

    def in_place_of(self, t: Any, weight: Parameter) -> Tensor:  # noqa: ARG002
        """The weight itself."""
        return weight

    def beside_embedding(
        self,
        t: Any,  # noqa: ARG002
        out: Tensor,
        weight: Parameter,  # noqa: ARG002
        ids: Tensor | None,  # noqa: ARG002
        module: str,  # noqa: ARG002
    ) -> Tensor:
        """Its result, as it is."""
        return out

    def declare(self, t: Any, weight: Parameter, module: str) -> None:
        """Nothing stands on what is counted."""

    def declare_on_weight(self, t: Any, weight: Parameter) -> None:
        """Nor on its weights."""
