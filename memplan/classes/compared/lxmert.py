"""LXMERT: layers of text, layers of a picture's regions, and layers in which either stream reads the other.

(transformers 5.23: models/lxmert)
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from memplan.classes.compared.vilt import answers
from memplan.classes.encoders.base import LAYER_NORM, Encoder, EncoderLayer
from memplan.classes.encoders.bert import BertPredictionHeadTransform
from memplan.classes.encoders.layers import (
    Heads,
    Intermediate,
    Layer,
    Output,
    Pooler,
    SelfOutput,
)
from memplan.classes.encoders.tables import TypesLast, zero_ids
from memplan.classes.encoders.tasks import EncodedStates, EncoderTask, OutputMatrix, Tasks
from memplan.classes.sounds.base import begin
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import in_heads, matmul
from memplan.graph.modules.basic import Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import add_in_place, log_softmax, softmax
from memplan.graph.modules.handles import Handle, empty, made_by, seen_in
from memplan.graph.modules.layer_list import LayerList, numbered
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import NUM_REGIONS, LayerSpec, NormPlacement
from memplan.model.parameters import LayerBlock, ModelPart


class LxmertEncoded(NamedTuple):
    """What the base model returns."""

    last_hidden_state: Handle
    pooler_output: Handle
    vision_output: Handle


class LxmertEmbeddings(TypesLast):
    num_buffers = 0

    def position_ids(self, batch: int, length: int) -> Handle:
        counted = made_by(self.run, OperationKind.ARANGE, (length,), DType.INT64)
        return seen_in(self.run, counted.record, (batch, length))


class LxmertAttention(Heads):
    """Queries of one stream, keys and values of another, or of the same."""

    def forward(self, x: Handle, context: Handle, mask: Handle | None) -> Handle:
        query_layer = in_heads(self.query(x), self.head_dim)
        key_layer = in_heads(self.key(context), self.head_dim)
        value_layer = in_heads(self.value(context), self.head_dim)
        attention_scores = matmul(query_layer, key_layer.transpose(2, 3))
        attention_scores = attention_scores / self.head_dim**0.5
        if mask is not None:
            attention_scores = attention_scores + mask
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*x.shape[:2], -1)
        return context_layer


class LxmertSelfAttentionLayer(Module):
    block = LayerBlock.ATTENTION
    heads_name = "self"

    def __init__(self, config: ConfigReader) -> None:
        setattr(self, self.heads_name, LxmertAttention(config))
        self.output = SelfOutput(config)

    @property
    def heads(self) -> LxmertAttention:
        found = self.children[self.heads_name]
        assert isinstance(found, LxmertAttention)
        return found

    def facts(self) -> AttentionSpec:
        return self.heads.facts()

    @property
    def probability(self) -> float:
        return self.output.dropout.probability

    def forward(self, input_tensor: Handle, mask: Handle | None) -> Handle:
        output = self.heads(input_tensor, input_tensor, mask)
        attention_output: Handle = self.output(output, input_tensor)
        return attention_output


class LxmertCrossAttentionLayer(LxmertSelfAttentionLayer):
    block = LayerBlock.CROSS_ATTENTION
    heads_name = "att"

    def forward(self, input_tensor: Handle, ctx_tensor: Handle, mask: Handle | None) -> Handle:  # type: ignore[override]
        output = self.heads(input_tensor, ctx_tensor, mask)
        attention_output: Handle = self.output(output, input_tensor)
        return attention_output


class LxmertLayer(Layer):
    attention_class = LxmertSelfAttentionLayer  # type: ignore[assignment]

    def forward(self, x: Handle, mask: Handle | None) -> Handle:  # type: ignore[override]
        attention_output = self.attention(x, mask)
        intermediate_output = self.intermediate(attention_output)
        layer_output: Handle = self.output(intermediate_output, attention_output)
        return layer_output


class LxmertXLayer(EncoderLayer):
    further = 1

    def __init__(self, config: ConfigReader) -> None:
        self.visual_attention = LxmertCrossAttentionLayer(config)
        self.lang_self_att = LxmertSelfAttentionLayer(config)
        self.visn_self_att = LxmertSelfAttentionLayer(config)
        self.lang_inter, self.lang_output = Intermediate(config), Output(config)
        self.visn_inter, self.visn_output = Intermediate(config), Output(config)

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=self.lang_self_att.facts(), feed_forward=self.lang_inter.facts(),
            norm=LAYER_NORM, placement=NormPlacement.POST, dropout=self.lang_self_att.probability,
        )  # fmt: skip

    def forward(self, lang: Handle, visual: Handle, mask: Handle) -> tuple[Handle, Handle]:
        lang_att_output = self.visual_attention(lang, visual, None)
        visual_att_output = self.visual_attention(visual, lang, mask)
        lang_att_output, visual_att_output = (
            self.lang_self_att(lang_att_output, mask),
            self.visn_self_att(visual_att_output, None),
        )
        lang_output, visual_output = self.output_fc(lang_att_output, visual_att_output)
        return lang_output, visual_output

    def output_fc(self, lang: Handle, visual: Handle) -> tuple[Handle, Handle]:
        """Two networks."""
        lang_inter_output = self.lang_inter(lang)
        visual_inter_output = self.visn_inter(visual)
        lang_output = self.lang_output(lang_inter_output, lang)
        visual_output = self.visn_output(visual_inter_output, visual)
        return lang_output, visual_output


class LxmertVisualFeatureEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.sizes = config.integer("visual_feat_dim"), config.integer("visual_pos_dim")
        self.visn_fc = Linear(self.sizes[0], hidden, bias=True)
        self.visn_layer_norm = LayerNorm(hidden)
        self.box_fc = Linear(self.sizes[1], hidden, bias=True)
        self.box_layer_norm = LayerNorm(hidden)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def given(self, batch: int) -> list[Handle]:
        """Features and boxes of a picture's regions."""
        run, rows = self.run, batch * NUM_REGIONS
        return [
            Handle(run, from_batch(run, rows * each, run.compute), (batch, NUM_REGIONS, each))
            for each in self.sizes
        ]

    def forward(self, visual_feats: Handle, visual_pos: Handle) -> Handle:
        x = self.visn_fc(visual_feats)
        x = self.visn_layer_norm(x)
        y = self.box_fc(visual_pos)
        y = self.box_layer_norm(y)
        output = (x + y) / 2.0
        output = self.dropout(output)
        return output


class StreamLayers(LayerList):
    """Each result waits in a tuple until the model returns, so that no layer stands for others."""

    def __init__(
        self, config: ConfigReader, name: str, layer: Callable[[ConfigReader], Module]
    ) -> None:
        kinds = [None] * config.layers(name)
        super().__init__(f"encoder.{name}", kinds, lambda _: layer(config), streams=True)
        self.ends = name == "x_layers"


class LxmertEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.visn_fc = LxmertVisualFeatureEncoder(config)
        self.layer = StreamLayers(config, "l_layers", LxmertLayer)
        self.x_layers = StreamLayers(config, "x_layers", LxmertXLayer)
        self.r_layers = StreamLayers(config, "r_layers", LxmertLayer)

    def forward(self, lang_feats: Handle, mask: Handle) -> tuple[Handle, Handle]:
        run = self.run
        hidden_states = [lang_feats]  # what the base model's own variable names, too
        run.finish(lang_feats.record)
        begin(self, "encoder.embed", ModelPart.EMBEDDING, None)
        visual_feats = self.visn_fc(*self.visn_fc.given(lang_feats.shape[0]))
        run.finish(visual_feats.record)
        for layer_module in self.layer:
            lang_feats = layer_module(lang_feats, mask)
            hidden_states.append(lang_feats)
        for layer_module in self.r_layers:
            visual_feats = layer_module(visual_feats, None)
            hidden_states.append(visual_feats)
        for layer_module in self.x_layers:
            lang_feats, visual_feats = layer_module(lang_feats, visual_feats, mask)
            hidden_states += [visual_feats, lang_feats]
        return lang_feats, visual_feats


class LxmertLMPredictionHead(Module):
    """Its bias is added to what the output matrix gives."""

    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = OutputMatrix(task.spec, task.spec.hidden_size, bias=False)
        self.decoder.tie(task)
        self.bias = Weight(task.spec.num_outputs)

    def forward(self, x: Handle) -> Handle:
        x = self.transform(x)
        x = self.decoder(x) + self.operand(self.bias)
        return x


class LxmertPreTrainingHeads(Module):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        self.predictions = LxmertLMPredictionHead(config, task)
        self.seq_relationship = Linear(config.integer("hidden_size"), 2, bias=True)


class LxmertVisualAnswerHead(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.logit_fc = answers(hidden, 2 * hidden, config.integer("num_qa_labels"))

    def forward(self, x: Handle) -> Handle:
        made: Handle = self.logit_fc(x)
        return made


FEATURES = "feat"
"""The loss that compares a region's features themselves."""
REGION_LOSSES = (
    ("obj", "num_object_labels"),
    ("attr", "num_attr_labels"),
    (FEATURES, "visual_feat_dim"),
)
"""What is predicted of regions, and the key that says how many numbers it is."""


class LxmertVisualObjHead(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.transform = BertPredictionHeadTransform(config)
        self.names = [name for name, _ in REGION_LOSSES if config.flag(f"visual_{name}_loss")]
        for name, key in REGION_LOSSES:
            if name in self.names:
                setattr(
                    self, f"decoder_dict.{name}", Linear(hidden, config.integer(key), bias=True)
                )

    def forward(self, x: Handle) -> dict[str, Handle]:
        x = self.transform(x)
        return {name: self.children[f"decoder_dict.{name}"](x) for name in self.names}


class LxmertForPreTraining(EncoderTask):
    """Masked tokens, whether the picture fits, what its regions are, and answers."""

    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        self.cls = LxmertPreTrainingHeads(config, self)
        if config.flag("task_obj_predict"):
            self.obj_predict_head = LxmertVisualObjHead(config)
        layers = self.encoder.children["encoder"].children["x_layers"]
        assert isinstance(layers, StreamLayers)
        layers.ends = not self.region_losses
        if config.flag("task_qa"):
            self.answer_head = LxmertVisualAnswerHead(config)

    @property
    def region_losses(self) -> list[str]:
        """What is predicted of regions."""
        head = self.children.get("obj_predict_head")
        return head.names if isinstance(head, LxmertVisualObjHead) else []

    def loss_of(self, outputs: LxmertEncoded) -> Tensor:  # type: ignore[override]
        run = self.run
        lang_output, pooled_output, visual_output = outputs
        lang_prediction_scores = self.cls.predictions(lang_output)
        cross_relationship_score = self.cls.seq_relationship(pooled_output)
        given = [lang_prediction_scores, cross_relationship_score]
        if "answer_head" in self.children:
            given.append(self.answer_head(pooled_output))
        for _ in ("matched_label", "ans"):
            from_batch(run, run.options.batch_size, DType.INT64)
        total_loss = made_by(run, OperationKind.ZEROS, (1,), DType.FP32)
        for scores in given[:2]:
            total_loss = self.added(total_loss, scores)
        if "obj_predict_head" in self.children:
            total_visual_loss = made_by(run, OperationKind.ZEROS, (1,), DType.FP32)
            predicted = self.obj_predict_head(visual_output)
            for key, scores in predicted.items():
                visual_loss = self.region_loss(key, scores)
                total_visual_loss = add_in_place(total_visual_loss, visual_loss)
            total_loss = add_in_place(total_loss, total_visual_loss)
        for scores in given[2:]:
            total_loss = self.added(total_loss, scores)
        for each in given:
            run.returned.append(each.record)
            run.give_out(each.record)
        return total_loss.record

    def added(self, total_loss: Handle, scores: Handle) -> Handle:
        """The total and the cross entropy of scores."""
        loss = Handle(self.run, cross_entropy(self.run, scores.record), (1,))
        return add_in_place(total_loss, loss)

    def region_loss(self, key: str, scores: Handle) -> Handle:
        """The mean over regions, each times how sure its label is."""
        run, rows = self.run, scores.numel // scores.shape[-1]
        if key == FEATURES:
            visual_loss = smooth_l1(scores)
            visual_loss = visual_loss.mean()
        else:
            ids = Handle(run, from_batch(run, rows, DType.INT64), (rows,))
            visual_loss = likelihood(scores, ids)
        sure = Handle(run, from_batch(run, rows, run.compute), (rows,))
        weighed = Handle(run, run.mul(visual_loss.record, sure.record), (1, rows))
        return Handle(run, weighed.mean().record, (1,)) * 1.0


def smooth_l1(x: Handle) -> Handle:
    """``SmoothL1Loss(reduction="none")``, which autocast runs in fp32: keeps both."""
    run = x.run
    given = x if run.autocast is None else x.float()
    target, made = from_batch(run, x.numel, given.dtype), empty(run, x.shape, given.dtype)
    run.record(
        OperationKind.SMOOTH_L1, (given.record,), (made.record,), saves=(given.record, target),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return made


def likelihood(scores: Handle, labels: Handle) -> Handle:
    """``CrossEntropyLoss(reduction="none")``."""
    run, log_probabilities = scores.run, log_softmax(scores, widened=False)
    if run.autocast is not None:
        log_probabilities = log_probabilities.float()
    made, weight = empty(run, labels.shape, log_probabilities.dtype), run.tensor(1, DType.FP32)
    run.record(
        OperationKind.NLL_LOSS, (log_probabilities.record, labels.record), (made.record, weight),
        saves=(log_probabilities.record, labels.record, weight),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return made


class LxmertForQuestionAnswering(EncoderTask):
    """Answers as classes."""

    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        self.answer_head = LxmertVisualAnswerHead(config)

    def loss_of(self, outputs: LxmertEncoded) -> Tensor:  # type: ignore[override]
        answer_score = self.answer_head(outputs.pooler_output)
        self.run.returned.append(answer_score.record)
        self.run.give_out(answer_score.record)
        return cross_entropy(self.run, answer_score.record)


class LxmertModel(Encoder):
    prefix = "lxmert"
    eager_only = True
    recomputes = False
    num_regions = NUM_REGIONS
    tasks: ClassVar[Tasks] = {
        Task.PRETRAINING: LxmertForPreTraining,
        Task.BASE: EncodedStates,
        Task.QUESTION_ANSWERING: LxmertForQuestionAnswering,
    }

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        self.embeddings = LxmertEmbeddings(config)
        self.encoder = LxmertEncoder(config)
        self.pooler = Pooler(config)
        numbered(self)

    def forward(self, batch: int, length: int) -> LxmertEncoded:
        run = self.run
        attention_mask = made_by(run, OperationKind.ONES, (batch, length), DType.FP32)
        token_type_ids = zero_ids(self, batch, length)
        extended_attention_mask = attention_mask.unsqueeze(1).unsqueeze(2)
        extended_attention_mask = extended_attention_mask.to(run.compute)
        extended_attention_mask = extended_attention_mask.apart(OperationKind.SUB)
        extended_attention_mask = extended_attention_mask.apart(OperationKind.MUL_SCALAR)
        lang_output, visual_output = self.encoder(
            self.embeddings(batch, length, token_type_ids), extended_attention_mask
        )
        pooled_output = self.pooler(lang_output)
        return LxmertEncoded(lang_output, pooled_output, visual_output)
