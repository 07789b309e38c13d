"""X-MOD: RoBERTa with an adapter for each language behind the network, norms as three flags say.

(transformers 5.23: models/xmod)

Every adapter is called with the sequences of its language. All are taken to be of ``default_language``, or of the
first: the others' adapters are given nothing, and their weights gradients of zeros all the same.
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import LAYER_NORM, Encoded, EncoderLayer
from memplan.classes.encoders.bert import RobertaModel
from memplan.classes.encoders.layers import Attention, AttentionParts, LayerParts, SelfOutput, Stack
from memplan.classes.encoders.tasks import PooledMultipleChoice, Tasks
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import copy_at, picked, zeros
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import NormPlacement
from memplan.model.norms import NormSpec
from memplan.model.parameters import LayerBlock


class XmodSelfOutput(SelfOutput):
    """Its norm is called by what it is in."""

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        x = self.dense(x)
        x = self.dropout(x)
        x = x + input_tensor
        return x


class XmodAttention(Attention):
    output_class: Callable[[ConfigReader], SelfOutput] = XmodSelfOutput

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.pre_norm = config.flag("pre_norm")

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Attended:
        residual = x
        if self.pre_norm:
            x = self.output.LayerNorm(x)
        attention_output, attn_weights = self.self(x, *beside)
        attention_output = self.output(attention_output, residual)
        if not self.pre_norm:
            attention_output = self.output.LayerNorm(attention_output)
        return attention_output, attn_weights


class XmodAdapter(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden, key = config.integer("hidden_size"), "adapter_reduction_factor"
        width = hidden // config.integer(key)
        if not width:
            error = config.fail(key, f"leaves nothing of {hidden} dimensions")
            raise error
        self.dense1 = Linear(hidden, width, bias=True)
        self.dense2 = Linear(width, hidden, bias=True)
        self.adapter_act_fn = ActivationModule(read_activation(config, "hidden_act"))

    def forward(self, x: Handle) -> Handle:
        x = self.dense1(x)
        x = self.adapter_act_fn(x)
        x = self.dense2(x)
        return x


class XmodAdapters(Module):
    """``torch.nn.ModuleDict``, by the languages' names."""

    def __init__(self, config: ConfigReader) -> None:
        key = "languages"
        languages = config.texts(key)
        if not languages:
            error = config.fail(key, "is empty; name at least one")
            raise error
        default = config.text("default_language", default=languages[0])
        self.default = config.choice("default_language", default, languages)
        for each in languages:
            setattr(self, each, XmodAdapter(config))


class XmodOutput(Module):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(config.integer("intermediate_size"), hidden, bias=True)
        self.LayerNorm = LayerNorm(hidden)
        self.ln_before_adapter = config.flag("ln_before_adapter")
        self.dropout = Dropout(config.number("hidden_dropout_prob"))
        own = config.flag("adapter_layer_norm")
        self.adapter_layer_norm = LayerNorm(hidden) if own else None
        self.adapter_reuse_layer_norm = config.flag("adapter_reuse_layer_norm")
        self.adapter_modules = XmodAdapters(config)

    def forward(self, x: Handle, input_tensor: Handle, lang_ids: Handle) -> Handle:
        x = self.dense(x)
        x = self.dropout(x)
        x = x + input_tensor
        x = self.lang_adapter(lang_ids, x)
        return x

    def lang_adapter(self, lang_ids: Handle, x: Handle) -> Handle:
        residual = x
        if self.adapter_layer_norm is not None:
            x = self.adapter_layer_norm(x)
        elif self.adapter_reuse_layer_norm:
            x = self.LayerNorm(x)
        if self.ln_before_adapter:
            residual = x
        new_hidden_states = zeros(x)
        for language, adapter in self.adapter_modules.children.items():
            rows = x.shape[0] * (language == self.adapter_modules.default)
            lang_mask = lang_ids.apart(OperationKind.EQ, dtype=DType.BOOL)
            lang_hidden_states = picked(x, lang_mask, rows)
            adapted_lang_hidden_states = adapter(lang_hidden_states)
            new_hidden_states = copy_at(new_hidden_states, adapted_lang_hidden_states)
        x = self.dropout(new_hidden_states)
        x += residual
        return x


class XmodLayer(LayerParts):
    output: XmodOutput
    attention_class: Callable[[ConfigReader], AttentionParts] = XmodAttention
    output_class: Callable[[ConfigReader], Module] = XmodOutput

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.pre_norm = config.flag("pre_norm")
        if self.pre_norm:
            self.placement = NormPlacement.PRE

    def forward(self, x: Handle, mask: Handle | None, lang_ids: Handle) -> Handle:
        attention_output, _ = self.attention(x, mask)
        residual = attention_output
        if self.pre_norm:
            attention_output = self.output.LayerNorm(attention_output)
        intermediate_output = self.intermediate(attention_output)
        layer_output = self.output(intermediate_output, residual, lang_ids)
        if not self.pre_norm:
            layer_output = self.output.LayerNorm(layer_output)
        return layer_output


class XmodEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = XmodLayer

    def __init__(self, config: ConfigReader) -> None:
        self.norm = "LayerNorm" if config.flag("pre_norm") else ""
        super().__init__(config)


class XmodModel(RobertaModel):
    encoder: XmodEncoder
    tasks: ClassVar[Tasks] = {**RobertaModel.tasks, Task.MULTIPLE_CHOICE: PooledMultipleChoice}
    encoder_class: Callable[[ConfigReader], Module] = XmodEncoder

    def last_norm(self) -> NormSpec | None:
        return LAYER_NORM if self.encoder.children.get("LayerNorm") is not None else None

    def forward(self, batch: int, length: int) -> Encoded:
        ones = made_by(self.run, OperationKind.ONES, (batch,), DType.FP32)
        lang_ids = ones.apart(OperationKind.MUL_SCALAR)  # the default language's
        del ones
        embedding_output = self.embeddings(batch, length)
        sequence_output = self.encoder(embedding_output, None, lang_ids)
        return Encoded(sequence_output, self.pooled(sequence_output))
