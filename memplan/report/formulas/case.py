"""What every published formula is asked about, and a row of its answer."""

from memplan.errors import UnsupportedOperationError
from memplan.fast_dataclass import dataclass
from memplan.formulas.activations import (
    layer_activation_bytes,
)
from memplan.formulas.flops import FormulaShape
from memplan.graph.counts import ParameterCounts, count_parameters
from memplan.model.spec import ModelSpec
from memplan.report.shape import formula_shape
from memplan.training.choices import Recomputation
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup

NO_ACTIVATIONS = "activations, logits, buffers, gathered parameters"


TEXTBOOK_LAYER = (
    "logits, temporaries, kernels other than Megatron's, grouped queries, gated networks"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodRow:
    """One method's figures for one GPU."""

    method: str
    setting: str
    """The stage or variant that the row is of."""
    states_bytes: int | None
    """Parameters, gradients, optimizer; None where the method does not count them."""
    activations_bytes: int | None
    """Kept from forward to backward; None where the method does not count them."""
    total_bytes: int
    """What the method would have you buy."""
    formula: str
    """In letters; ``numbers_of`` has their values."""
    source: str
    leaves_out: str


def known_shape(model: ModelSpec) -> FormulaShape | None:
    """The model's sizes; None for a kind of model that the formulas are not about."""
    try:
        return formula_shape(model)
    except UnsupportedOperationError:
        return None


@dataclass(frozen=True, slots=True)
class Case:
    """One question to all of them."""

    model: ModelSpec
    setup: TrainingSetup
    counts: ParameterCounts

    @property
    def precision(self) -> int:
        """Bytes of a number as the textbooks mean it: 2 in mixed precision, 4 in fp32."""
        formats = PRECISIONS[self.setup.chosen_precision]
        return (formats.autocast or formats.compute).num_bytes

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.setup.seq_len or 1

    @property
    def batch_size(self) -> int:
        """Sequences of a micro-batch."""
        return self.setup.micro_batch_size

    @property
    def checkpointed(self) -> bool:
        """Whether every layer is computed again."""
        return self.setup.checkpointing is Recomputation.FULL

    def layer_bytes(self, shape: FormulaShape) -> int:
        """What a layer keeps [bytes]: equation 2 of arXiv:2205.05198."""
        return layer_activation_bytes(
            shape.hidden_size, num_heads=shape.num_heads, seq_len=self.seq_len,
            batch_size=self.batch_size, precision=self.precision,
        )  # fmt: skip


def numbers_of(model: ModelSpec, setup: TrainingSetup) -> str:
    """The letters of all formulas, with their values."""
    resolved = setup.resolve(model.context_length)
    counts, shape = count_parameters(model), known_shape(model)
    case = Case(model, resolved, counts)
    text = (
        f"Φ = {counts.total:,} parameters, Λ = {counts.largest_layer:,} in the largest module, "
        f"n = {resolved.num_gpus}, p = {case.precision} bytes, s = {case.seq_len:,} tokens, "
        f"b = {case.batch_size}"
    )
    if shape is None:
        return f"{text}; no formula for activations is about this kind of model"
    width = shape.intermediate_size or shape.expert_size
    return (
        f"{text}, h = {shape.hidden_size:,}, a = {shape.num_heads}, L = {model.num_layers}, "
        f"f = {width:,}, V = {model.vocab_size:,}"
    )
