"""What a task adds on top of a model, as data."""

from __future__ import annotations

from enum import Enum

from memplan.fast_dataclass import dataclass


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
class HeadSpec:
    """What the task adds on top of the base model."""

    tied: bool = False
    """The output matrix is the token table."""
    num_rows: int = 0
    """Rows of the output matrix where they are not the token table's (GLM-Image); 0: the same."""
    bias: bool = False
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
    token_dropout: float = 0.1
    """Before a decoder's classes of tokens; what ``GenericForTokenClassification`` falls back on (transformers 5.23,
    ``modeling_layers``)."""
    vector_size: int = 0
    """Each token becomes a vector of so many numbers, whose length is one (ColPali); 0: none does."""
