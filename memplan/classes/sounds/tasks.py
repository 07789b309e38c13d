"""What classes of tasks make of a speech encoder's frames: transcripts, classes of clips and of frames, speakers.

(transformers 5.23, models/wav2vec2/modeling_wav2vec2.py)
"""

from typing import Any

from memplan.classes.sensed.counted import Parts
from memplan.classes.sounds.base import SoundModel, SoundTask
from memplan.dtypes import DType
from memplan.families.towers.sizes import at_least_one, each_stage
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import Dropout, Linear
from memplan.graph.modules.functional import mean_of_tokens, softmax
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.module import Weight
from memplan.graph.modules.strides import Shape
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader

CTC, PRETRAINING = "ForCTC", "ForPreTraining"
SEQUENCES, FRAMES = "ForSequenceClassification", "ForAudioFrameClassification"
SPEAKERS = "ForXVector"


class SpeechTask(SoundTask):
    """The base model has frames, and perhaps an adapter that makes them fewer."""


class ForCTC(SpeechTask):
    """Logits of every frame, and connectionist temporal classification."""

    def add_head(self, config: ConfigReader) -> None:
        """Dropout and the output matrix."""
        self.dropout = Dropout(config.number("final_dropout", default=0.0))
        self.lm_head = Linear(
            self.model.output_width(config), config.integer("vocab_size"), bias=True
        )

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """Of as many labels as there are, at most a frame each."""
        del others
        hidden_states = self.dropout(last_hidden_state)
        logits = self.lm_head(hidden_states)
        batch, length, _ = logits.shape
        labels = min(self.run.options.target_seq_len, length)
        from_batch(self.run, batch * labels, DType.INT64)
        attention_mask = self.mask_of_ones(batch)
        loss = ctc_loss(logits, labels)
        del attention_mask
        hand_out(self.run, logits.record)
        return loss

    def mask_of_ones(self, batch: int) -> Handle | None:
        """``torch.ones_like(input_values, dtype=torch.long)``, where what is given is a signal."""
        model: SoundModel = self.model
        if model.sound.is_framed:
            return None
        shape = batch, model.clips_length()
        return made_by(self.run, OperationKind.MASK, shape, DType.INT64)


def ctc_loss(logits: Handle, labels: int) -> Tensor:
    """fp32 log-probabilities, and a table of paths over frames and labels, kept. Their gradient comes frame by frame,
    and is copied where there are several samples."""
    run, (batch, length, _) = logits.run, logits.shape
    given = logits if logits.dtype is DType.FP16 else logits.float()
    log_probs = empty(run, logits.shape, DType.FP32)
    run.record(
        OperationKind.LOG_SOFTMAX, (given.record,), (log_probs.record,), saves=(log_probs.record,),
        gradients=(Gradient.FRESH,),
        backward_scratch_bytes=() if batch == 1 else (RESULT, log_probs.record.storage.num_bytes),
    )  # fmt: skip
    del given
    paths = run.tensor(batch * length * (2 * labels + 1), DType.FP32)
    each, loss = run.tensor(batch, DType.FP32), run.tensor(1, DType.FP32)
    run.record(
        OperationKind.NLL_LOSS, (log_probs.record,), (loss, paths, each),
        saves=(log_probs.record, paths, each), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=paths_back(paths.storage.num_bytes, logits.shape, labels),
    )  # fmt: skip
    return loss


MANY = 450
"""From which size, as torch counts it, blanks are summed apart from what labels are left."""


def paths_back(paths: int, shape: Shape, labels: int) -> tuple[int, ...]:
    """What CTC's backward formula asks for beside its result: lengths, the paths from behind, and where they are many
    those of both ways through blanks, of which a logarithm of sums is taken (torch 2.13,
    aten/src/ATen/native/cuda/LossCTC.cu, ``ctc_loss_backward_gpu_template``; ReduceOps.cpp, ``logsumexp_out_impl``).
    """
    batch, length, vocabulary = shape
    lengths = (allocated_bytes(batch, DType.INT64),) * 3
    if 2 * length + 24 * batch // 10 + 2 * vocabulary // 10 <= MANY:
        return (*lengths, paths, RESULT)
    both = allocated_bytes(batch * length * (labels + 1), DType.FP32)
    each, infinite = (allocated_bytes(batch * length, kind) for kind in (DType.FP32, DType.BOOL))
    largest_of = (each, each, infinite, ~8, ~7)
    sums_of = (both, each, ~11, ~6, ~12)
    return (*lengths, paths, RESULT, both, *largest_of, *sums_of, ~5, ~3)


class ClassifiedTask(SpeechTask):
    """It may read a sum over all layers' results, each times a share."""

    reads_adapted = False
    """The class has no objection to an adapter."""

    def add_head(self, config: ConfigReader) -> None:
        """The layers' shares, where there are any.

        Raises ``ConfigError`` beside an adapter, where the class raises.
        """
        if config.flag("add_adapter") and not self.reads_adapted:
            error = config.fail("add_adapter", "the class for this task raises beside an adapter")
            raise error
        if config.flag("use_weighted_layer_sum"):
            self.layer_weights = Weight(config.layers("num_hidden_layers") + 1)

    def weighed(self, last_hidden_state: Handle, all_hidden_states: list[Handle]) -> Handle:
        """The last layer's result, or the sum."""
        if "layer_weights" not in self.weights:
            return last_hidden_state
        hidden_states = stacked(all_hidden_states)
        norm_weights = softmax(self.operand(self.layer_weights))
        run, product = self.run, hidden_states.run.mul(hidden_states.record, norm_weights.record)
        made = empty(run, last_hidden_state.shape, product.dtype)
        run.record(OperationKind.SUM, (product,), (made.record,), gradients=(Gradient.ALIAS,))
        return made


def stacked(parts: list[Handle]) -> Handle:
    """``torch.stack(parts, dim=1)``: their gradients are parts of one."""
    run, (batch, *rest) = parts[0].run, parts[0].shape
    made = empty(run, (batch, len(parts), *rest), parts[0].dtype)
    gradients = (Gradient.SEEN,) * len(parts)
    run.record(
        OperationKind.CAT, [each.record for each in parts], (made.record,), gradients=gradients
    )
    return made


class ForSequenceClassification(ClassifiedTask):
    """Classes of each clip, by the mean of its frames."""

    def add_head(self, config: ConfigReader) -> None:
        """Two linear layers."""
        super().add_head(config)
        width = config.integer("classifier_proj_size")
        self.projector = Linear(self.model.width, width, bias=True)
        self.classifier = Linear(width, self.spec.num_labels, bias=True)

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """Cross-entropy."""
        hidden_states = self.weighed(last_hidden_state, others[0])
        hidden_states = self.projector(hidden_states)
        pooled_output = mean_of_tokens(hidden_states)
        logits = self.classifier(pooled_output)
        labels = from_batch(self.run, logits.shape[0], DType.INT64)
        loss = cross_entropy(self.run, logits.record, labels)
        hand_out(self.run, logits.record)
        return loss


class ForAudioFrameClassification(ClassifiedTask):
    """Classes of each frame, and the loss of the likeliest; labels come as one number for each class."""

    def add_head(self, config: ConfigReader) -> None:
        """A linear layer."""
        super().add_head(config)
        self.classifier = Linear(self.model.width, self.spec.num_labels, bias=True)

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """Cross-entropy."""
        run, hidden_states = self.run, self.weighed(last_hidden_state, others[0])
        logits = self.classifier(hidden_states)
        rows = logits.numel // self.spec.num_labels
        from_batch(run, logits.numel, DType.INT64)
        labels = made_by(run, OperationKind.MAX, (rows,), DType.INT64)
        loss = cross_entropy(run, logits.record, labels.record)
        hand_out(run, logits.record)
        return loss


class ForXVector(ClassifiedTask):
    """Time-delay layers, statistics over time (hence twice the width), and a vector a speaker."""

    is_counted = reads_adapted = True

    def add_head(self, config: ConfigReader) -> None:
        """Declare them."""
        super().add_head(config)
        widths = at_least_one(config, "tdnn_dim")
        kernels = each_stage(config, "tdnn_kernel", len(widths))
        self.projector = Linear(self.model.width, widths[0], bias=True)
        before = widths[0]
        for index, (width, kernel) in enumerate(zip(widths, kernels, strict=True)):
            setattr(self, f"tdnn.{index}", Parts(kernel=Linear(before * kernel, width, bias=True)))
            before = width
        out = config.integer("xvector_output_dim")
        self.feature_extractor = Linear(2 * before, out, bias=True)
        self.classifier = Linear(out, out, bias=True)
        self.objective = Parts(weight=Weight(out, self.spec.num_labels))


class ForPreTraining(SpeechTask):
    """A quantizer, and two projections to the width where vectors meet."""

    is_counted = True

    def add_head(self, config: ConfigReader) -> None:
        """Declare them."""
        width, met = config.integer("codevector_dim"), config.integer("proj_codevector_dim")
        groups = config.integer("num_codevector_groups")
        count = groups * config.integer("num_codevectors_per_group")
        narrow = config.divide("codevector_dim", width, "num_codevector_groups", groups)
        inner = Linear(at_least_one(config, "conv_dim")[-1], count, bias=True)
        self.quantizer = Parts(codevectors=Weight(1, count, narrow), weight_proj=inner)
        self.project_hid = Linear(self.model.width, met, bias=True)
        self.project_q = Linear(width, met, bias=True)


BASIC_ENDINGS: dict[str, type[SoundTask]] = {CTC: ForCTC, SEQUENCES: ForSequenceClassification}
"""Classes that every type has."""
ENDINGS: dict[str, type[SoundTask]] = {
    **BASIC_ENDINGS, FRAMES: ForAudioFrameClassification, SPEAKERS: ForXVector,
}  # fmt: skip
"""Classes of most types."""
PRETRAINED: dict[str, type[SoundTask]] = {**ENDINGS, PRETRAINING: ForPreTraining}
"""Classes of types whose class for pretraining is written down here."""
