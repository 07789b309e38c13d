"""An encoder and a decoder: what every base model of two stacks is, and what each task's class makes of it.

(transformers 5.23: the classes ``For...`` of models/bart/modeling_bart.py, models/t5/modeling_t5.py and their kin)
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from memplan.classes.base import Base, Joiner
from memplan.classes.heads import MakeBase, Task, finish
from memplan.classes.sensed.counted import declare_all
from memplan.dtypes import DType
from memplan.families.request import ReadRequest
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.losses.tasks import copy_outputs
from memplan.graph.modules.basic import Dropout, Embedding, Linear
from memplan.graph.modules.functional import activated
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.masks import shifted_around, shifted_right
from memplan.graph.modules.module import Module, Site
from memplan.graph.operations.losses import cross_entropy, span_loss
from memplan.graph.stacks import BASE_MODEL
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.layers import EmbeddingSpec, LayerSpec
from memplan.model.networks import Activation
from memplan.model.norms import NormSpec
from memplan.model.parameters import ModelPart, WeightRole
from memplan.model.spec import ModelSpec, Tying

Tasks = Mapping[TaskKind, "type[SequenceTask]"]
"""The classes around a base model, the usual one first."""


class StackLayer(Module):
    """A layer of a stack, which says what others read of it."""

    def facts(self) -> LayerSpec:
        """Its heads, widths, norms and dropouts."""
        raise NotImplementedError


class Stack(Module):
    """Tokens to hidden states: an encoder, or a decoder."""

    joiner: Joiner = None
    """What writes over its embeddings; None: nothing does."""
    name: str
    """``encoder`` or ``decoder``."""
    table = "embed_tokens"
    """What it calls its token table."""

    def joined(self, embeds: Handle) -> Handle:
        """The embeddings, with what towers give in the place of the tokens that stand for it."""
        return embeds if self.joiner is None else self.joiner(embeds)[0]

    @property
    def layer_list(self) -> LayerList:
        """Its layers."""
        return next(each for each in self.children.values() if isinstance(each, LayerList))

    def embedding_facts(self) -> EmbeddingSpec:
        """What others read of its tables."""
        raise NotImplementedError

    def norm_facts(self) -> NormSpec | None:
        """The norm behind its layers, where it has one."""
        return None

    @property
    def is_closed(self) -> bool:
        """It ends in a segment of its own, in which it returns."""
        return self.norm_facts() is not None

    def returned(self) -> None:
        """Leave it, in the segment behind its layers."""
        self.run.leave(self.name)


class Decoded(NamedTuple):
    """What a base model returns."""

    last_hidden_state: Handle
    encoder_last_hidden_state: Handle
    decoder_input_ids: Handle


class TwoStacks(Base):
    """A table of tokens, an encoder and a decoder."""

    has_two_stacks = True
    table = "shared"
    shifts_around = False
    """Of labels the last token comes first where a decoder reads them."""
    wraps = True
    """Tasks' classes have it as a module of their own; else they have its modules themselves."""
    default_labels = 2
    """Classes where the config says nothing of them."""
    always_tied = False
    """The output matrix is the token table, whatever the config says."""
    eager_only = False
    """The class has no other attention than the one written out in Python."""
    recomputes = True
    """It can checkpoint its layers."""
    tasks: ClassVar[Tasks] = {}
    context_keys: tuple[str, ...] = ("max_position_embeddings",)
    default_context: int | None = None
    """Tokens that it is made for where the config does not say."""

    encoder: Stack
    decoder: Stack

    def add_table(self, config: ConfigReader, table: Embedding) -> None:
        """Declare the table that both stacks look their tokens up in."""
        self.children[self.table] = table
        self.is_tied = self.always_tied or config.flag("tie_word_embeddings", default=True)

    @property
    def shared(self) -> Embedding:
        """The table that both stacks look their tokens up in."""
        found = self.children[self.table]
        assert isinstance(found, Embedding)
        return found

    @property
    def vocabulary(self) -> Embedding:
        """The table of the tokens that it predicts."""
        return self.shared

    def share_table(self) -> None:
        """Let both stacks look up in it, where the config says so."""
        if self.is_tied:
            for stack in (self.encoder, self.decoder):
                own = stack.children[stack.table]
                assert isinstance(own, Embedding)
                own.weight = self.shared.weight

    @staticmethod
    def understood(config: ConfigReader, request: ReadRequest) -> ReadRequest:
        """What is asked for, as the type's names have it."""
        del config
        return request

    @property
    def tying(self) -> Tying:
        """Whether the file and transformers agree on sharing matrices."""
        return Tying.CLEAR

    @property
    def scales_output(self) -> bool:
        """What its matrix of logits reads is scaled first."""
        return False

    def forward(self, batch: int, ids: Handle | None) -> Decoded:
        """Run the encoder over the source and the decoder over the target."""
        run = self.run
        if not self.is_tied:
            self.parameter_apart()
        self.encoder.joiner = self.joiner
        last_hidden_state = self.encoder(batch, run.options.seq_len)
        self.begin_decoder(last_hidden_state)
        if ids is None:
            ids = shifted(self, batch)
        decoded = self.decoder(*ids.shape, ids, last_hidden_state)
        return Decoded(decoded, last_hidden_state, ids)

    def parameter_apart(self) -> None:
        """Declare a shared table beside which each stack has its own: it serves nothing."""
        self.shared.parameter(self.shared.weight).unused = True

    def begin_decoder(self, memory: Handle) -> None:
        """What the encoder returned is held; the decoder's first segment begins."""
        run = self.run
        if run.segment.output is None:
            run.finish(memory.record)
        begin_embedding(self, "decoder")
        if not self.encoder.is_closed:
            self.encoder.returned()


def begin_embedding(module: Module, stack: str) -> None:
    """The segment of a stack's tables begins."""
    run, freeze = module.run, module.run.options.freeze
    whole = freeze.encoder if stack == "encoder" else freeze.decoder
    run.start(f"{stack}.embed", None, part=ModelPart.EMBEDDING, frozen=freeze.embeddings or whole)


def target_length(module: Module) -> int:
    """Tokens that the decoder reads of each sequence."""
    return module.run.options.target_seq_len


def shifted(module: Module, batch: int, *, around: bool = False) -> Handle:
    """The labels, as the decoder reads them; ``around``: their last token comes first."""
    return (shifted_around if around else shifted_right)(module.run, (batch, target_length(module)))


class SequenceTask(Task):
    """A base model of two stacks, and what a task does with what it returns."""

    def __init__(self, config: ConfigReader, model: ModelSpec, base: MakeBase) -> None:
        super().__init__(config, model, base)
        self.add_head(config)

    def add_head(self, config: ConfigReader) -> None:
        """Declare what the task adds."""

    @property
    def two(self) -> TwoStacks:
        """The base model."""
        found = getattr(self.base, "words", self.base)
        assert isinstance(found, TwoStacks)
        return found

    is_base = False
    """There is nothing around the base model."""

    @property
    def _wraps(self) -> bool:
        return self.base.is_joined or (self.two.wraps and not self.is_base)

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """A base model that is no module of its own has its modules' names alone."""
        owns = super().attach(site, path, within)
        if not self._wraps:
            self.base.attach(site, path, within)
        return owns

    def begin(self) -> None:
        """The encoder's first segment begins."""
        begin_embedding(self, "encoder")

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        """Run the base model, the head and the loss."""
        del length, received
        if self.is_counted:
            finish(self, declare_all(self))
            return
        run, decoder = self.run, self.two.decoder
        if self._wraps:
            run.enter(BASE_MODEL)
        outputs = self.base(batch, self.decoder_ids(batch))
        self.begin_head(outputs.last_hidden_state)
        if self._wraps:
            run.leave(BASE_MODEL)
        if not decoder.is_closed:
            decoder.returned()
        finish(self, self.loss_of(outputs))

    def decoder_ids(self, batch: int) -> Handle | None:
        """What the class makes of the labels before it calls the base model; None: it does so in between."""
        del batch
        return None

    def loss_of(self, outputs: Decoded) -> Tensor:
        """The loss of what the base model returned."""
        raise NotImplementedError


class DecodedStates(SequenceTask):
    """The model without a task: what it gives is the decoder's hidden states."""

    is_base = True

    def loss_of(self, outputs: Decoded) -> Tensor:
        """What a loss would be made of."""
        return outputs.last_hidden_state.record


class ConditionalGeneration(SequenceTask):
    """Logits of every token of the target, and the loss on them."""

    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        """The output matrix, which the table is where they are tied."""
        table = self.two.vocabulary
        self.lm_head = Linear(table.width, self.spec.num_outputs, role=WeightRole.OUTPUT)
        if self.spec.head.tied:
            self.lm_head.weight = table.weight

    def adjusted(self, logits: Handle) -> Handle:
        """What the class does with its logits."""
        return logits

    def loss_of(self, outputs: Decoded) -> Tensor:
        """Cross entropy; the logits are given out beside it."""
        run = self.run
        sequence_output = outputs.last_hidden_state
        if self.spec.head.scaled:
            sequence_output = sequence_output * 1.0
        lm_logits = self.lm_head(sequence_output)
        lm_logits = self.adjusted(lm_logits)
        given = lm_logits.float() if self.spec.head.loss_upcast else lm_logits
        loss = cross_entropy(run, given.record)
        run.returned.append(lm_logits.record)
        copy_outputs(run, lm_logits.record)
        return loss


class ClassificationHead(Module):
    """A dense layer and the classes, behind a dropout each."""

    def __init__(self, config: ConfigReader, model: ModelSpec) -> None:
        width = model.hidden_size
        self.dense = Linear(width, width, bias=True)
        self.dropout = Dropout(config.number("classifier_dropout", "classif_dropout"))
        self.out_proj = Linear(width, model.num_labels, bias=True)

    def forward(self, x: Handle) -> Handle:
        x = self.dropout(x)
        x = self.dense(x)
        x = activated(x, Activation.TANH)
        x = self.dropout(x)
        x = self.out_proj(x)
        return x


class SpanAnswering(SequenceTask):
    """Where an answer begins and ends, of a decoder that reads the source again."""

    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        """Two numbers for every token."""
        self.qa_outputs = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)

    def loss_of(self, outputs: Decoded) -> Tensor:
        """The mean of two cross entropies."""
        logits = self.qa_outputs(outputs.last_hidden_state)
        return span_loss(self.run, logits.record, self.spec.num_labels)


class LastTokenClassification(SequenceTask):
    """Classes of each sequence, by the decoder's last token of it."""

    def add_head(self, config: ConfigReader) -> None:
        """The head of ``BartForSequenceClassification``."""
        self.classification_head = ClassificationHead(config, self.spec)

    def loss_of(self, outputs: Decoded) -> Tensor:
        """Cross entropy."""
        hidden_states = outputs.last_hidden_state
        sentence_representation = picked(hidden_states)
        logits = self.classification_head(sentence_representation)
        return cross_entropy(self.run, logits.record)


def picked(x: Handle) -> Handle:
    """Rows that a boolean index picks, one of each sequence: a copy, whose gradient is put back into zeros."""
    batch, _, width = x.shape
    made = empty(x.run, (batch, width), x.dtype)
    x.run.record(OperationKind.INDEX, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


def clamped(x: Handle) -> Handle:
    """Clamp fp16 hidden states: the input is kept, and compared with both bounds in backward."""
    run = x.run
    if x.dtype is not DType.FP16:
        return x
    comparisons = 3 if run.decomposed else 2
    made = run.tensor(x.numel, x.dtype)
    run.record(
        OperationKind.CLAMP, (x.record,), (made,), saves=(x.record,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=comparisons * allocated_bytes(x.numel, DType.BOOL),
    )  # fmt: skip
    return x.like(made)


def checked(x: Handle) -> Handle:
    """Whether fp16 hidden states are finite, as those of a run that learns are: they are clamped else."""
    if x.dtype is DType.FP16:
        copy, bits = x.record.storage.num_bytes, allocated_bytes(x.numel, DType.BOOL)
        every = empty(x.run, (1,), DType.BOOL)
        x.run.record(
            OperationKind.ABS, (x.record,), (every.record,),
            forward_scratch_bytes=(copy, bits, bits, bits, ~2, ~1, ~0, RESULT),
        )  # fmt: skip
    return x


def projected_heads(key: Handle, head_dim: int) -> Handle:
    """Keys by heads, where they are projected, though the class does so behind the values' projection.

    Their gradient comes transposed, and the view of heads takes it as it is: it is the linear layer that
    copies it, when its own turn has come (torch 2.13, the order and layouts of autograd's nodes asked).
    """
    batch, length, _ = key.shape
    return key.view(batch, length, -1, head_dim).transpose(1, 2)
