"""Speech in, text out: an encoder of clips, a decoder of transcripts, and the class around both."""

from typing import Any

from memplan.classes.sounds.base import SoundModel, SoundStates, SoundTask, begin
from memplan.dtypes import DType
from memplan.families.classes import BARE
from memplan.families.request import ReadRequest, reject_task, task_named
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import shifted_right
from memplan.graph.modules.module import Module
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import ModelPart, WeightRole


class SoundStack(Module):
    """Layers and the norm behind them."""

    name = "encoder"
    norm = "layer_norm"
    """What the class calls the norm."""
    layers: LayerList
    layer_norm: LayerNorm

    def add_norm(self, made: LayerNorm) -> None:
        """Declare it, in a segment of its own."""
        made.segment = f"{self.name}.norm", ModelPart.NORM
        setattr(self, self.norm, made)


class SoundDecoder(SoundStack):
    """It has a table of tokens."""

    name = "decoder"
    embed_tokens: Embedding

    def begin(self) -> None:
        """Its first segment begins, which reads nothing of the encoder's."""
        begin(self, "decoder.embed", ModelPart.EMBEDDING, None)


class Recognizer(SoundModel):
    """An encoder and a decoder that reads what it gives."""

    prefix = "model"
    positions_key = "max_target_positions"
    """What its config calls the longest text."""
    output = "proj_out"
    """What its class calls the matrix of logits."""
    upcasts = False
    """Logits are cast to fp32 before the loss."""
    encoder: Module
    decoder: SoundDecoder
    longest: int | None = None
    """Tokens that positions are there for, where more raise."""

    def add_facts(
        self, config: ConfigReader, channels: int, length: int, rate: int, **how: Any
    ) -> None:
        """Say what it is given, and what it writes."""
        table = self.decoder.embed_tokens
        self.vocab, self.width = table.weight.shape
        self.tied = config.flag("tie_word_embeddings")
        self.sound = self.described(channels, length, rate, stacks=("encoder", "decoder"), **how)

    @classmethod
    def ending(cls, config: ConfigReader, family: str, task: Task | None) -> str:
        """By the task alone: an architecture of another is that of the usual one."""
        request = ReadRequest(
            name=family, model_type=family, task=task, num_labels=None, all_defaults={}
        )
        named = {task_named(each, family) or Task.OTHER: each for each in cls.endings}
        return {**named, Task.BASE: BARE}[reject_task(config, request, *named, Task.BASE)]

    def context_length(self, config: ConfigReader) -> int:
        """Of the text."""
        return config.integer(self.positions_key)

    def begin_first(self) -> None:
        """The encoder's first segment begins."""
        begin(self, "encoder.embed", ModelPart.EMBEDDING, None)

    def forward(self, clips: Handle, decoder_input_ids: Handle) -> tuple[Handle, Handle]:
        encoder_outputs = self.encoder(clips)
        self.decoder.begin()
        decoder_outputs = self.decoder(decoder_input_ids, encoder_outputs)
        return decoder_outputs, encoder_outputs


class Transcripts(SoundTask):
    """It is given the text that it should write."""

    def labels(self) -> Handle:
        """One sequence for each clip, of as many tokens as there are positions for."""
        run, longest = self.run, self.model.longest
        length = run.options.target_seq_len
        shape = run.options.batch_size, length if longest is None else min(length, longest)
        return Handle(run, from_batch(run, shape[0] * shape[1], DType.INT64), shape)

    def outputs(self) -> Any:
        """Run the base model on the labels, shifted."""
        labels = self.labels()
        shape = labels.shape
        decoder_input_ids = shifted_right(self.run, shape)
        return *self.base(self.model.clips(), decoder_input_ids), labels, decoder_input_ids


class TranscriptStates(Transcripts, SoundStates):
    """The model without a task."""


Recognizer.bare = TranscriptStates


class Generation(Transcripts):
    """Logits over the vocabulary, and their cross-entropy."""

    def add_head(self, config: ConfigReader) -> None:
        """The output matrix, which the table is where they are tied."""
        del config
        table = self.model.decoder.embed_tokens
        made = Linear(table.width, self.spec.num_outputs, role=WeightRole.OUTPUT)
        if self.spec.head.tied:
            made.weight = table.weight
        setattr(self, self.model.output, made)

    @property
    def head(self) -> Linear:
        """The output matrix."""
        found = self.children[self.model.output]
        assert isinstance(found, Linear)
        return found

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """The loss of what the decoder gave."""
        _, labels, _ = others
        head = self.head
        if head.weight.owner is not head:
            self.run.tie(head.parameter(head.weight), head.within)
        logits = head(last_hidden_state)
        given = logits.float() if self.model.upcasts else logits
        loss = cross_entropy(self.run, given.record, labels.record)
        hand_out(self.run, logits.record)
        return loss


GENERATION = "ForConditionalGeneration"
ENDINGS: dict[str, type[SoundTask]] = {GENERATION: Generation}
