"""What a task adds on top of a model, as data."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation, FeedForwardSpec
    from memplan.model.norms import NormSpec


class Pooling(Enum):
    """What a sequence classifier makes of the hidden states of all tokens."""

    FIRST = "first"
    """The first token's."""
    POOLER = "pooler"
    """What the base model's pooler made of the first token's."""
    LAST_LOGITS = "last_logits"
    """Every token is classified without a bias, and the last one's logits taken (decoders)."""


class Task(Enum):
    """What the model is trained for: which class of transformers is meant."""

    BASE = "base"
    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    MASKED_LM = "masked-lm"
    PRETRAINING = "pretraining"
    """The class's own objective where it is none of the others: ELECTRA's replaced tokens."""
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"
    """One logit for each choice, which is a sequence of the batch."""
    OTHER = "other"
    """What the class that ``architectures`` names is for, where it is none of these."""


WHOLE_SEQUENCES = frozenset({Task.SEQUENCE_CLASSIFICATION, Task.MULTIPLE_CHOICE})
"""Tasks whose logits are one row for each sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierSpec:
    """A classification head: a dense layer or none, then a linear layer to the classes."""

    pooling: Pooling = Pooling.FIRST
    """Of a sequence classifier; the others look at every token."""
    dense: Activation | None = None
    """The activation behind a dense layer of the hidden size; None for no such layer."""
    dropout: float = 0.0
    """Probability before the last linear layer, for sequences."""
    upcast_tokens: bool = False
    """Classes of tokens are cast to fp32 before their loss (``ForTokenClassification``)."""
    token_dropout: float = 0.0
    """The same, for tokens."""


DECODER_CLASSIFIER = ClassifierSpec(
    pooling=Pooling.LAST_LOGITS, token_dropout=0.1, upcast_tokens=True
)
"""A decoder's, with the dropout that ``GenericForTokenClassification`` falls back on
(transformers 5.23, ``modeling_layers``)."""


FEATURES = "feat"
"""The loss that compares a region's features themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionHeadSpec:
    """What LXMERT's pretraining predicts beside masked tokens."""

    activation: Activation
    norm: NormSpec
    losses: tuple[tuple[str, int], ...] = ()
    """What of each region, and how many numbers that is; a dense layer and a norm come first."""
    num_answers: int = 0
    """Of questions; 0: they are not asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """What the task adds on top of the base model."""

    tied: bool = False
    """The output matrix is the token table."""
    num_rows: int = 0
    """Rows of the output matrix where they are not the token table's (GLM-Image); 0: the same."""
    bias: bool = False
    transform: FeedForwardSpec | None = None
    """A dense layer and an activation before the output matrix (BERT's masked-LM head)."""
    transform_norm: NormSpec | None = None
    router_loss: bool = False
    """A load-balancing loss of all routers is added (``output_router_logits``)."""
    scaled: bool = False
    """The hidden states are scaled before, or the logits after, the output matrix."""
    attended_loss: bool = False
    """The decoder's loss takes the logits of attended tokens, picked by index, in their own dtype (Qwen2-Audio)."""
    unnamed_loss: bool = False
    """The class's name does not say which loss is its own: transformers warns, and torch.compile's graph
    breaks there (GPT-2: ``GPT2LMHeadModel``)."""
    loss_upcast: bool = False
    """The masked-LM loss casts the logits to fp32 first."""
    bias_added: bool = False
    """The output matrix's bias is a separate sum, owned by the head (ESM)."""
    spare_bias: bool = False
    """An untied output matrix leaves the head's own bias unused (BERT)."""
    pooler_tasks: tuple[Task, ...] = ()
    """Tasks whose class has a pooler: a dense layer and a tanh on the first token (BERT)."""
    vector_size: int = 0
    """Each token becomes a vector of so many numbers, whose length is one (ColPali); 0: none does."""
    discriminator: Activation | None = None
    """The activation of the head that tells replaced tokens from others (ELECTRA)."""
    regions: RegionHeadSpec | None = None
    """Pretraining predicts a picture's regions and answers too (LXMERT)."""
    classifier: ClassifierSpec | None = None
    """None for a decoder's: one linear layer over every token."""
