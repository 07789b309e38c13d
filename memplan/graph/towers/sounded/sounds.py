"""Signals and spectra as tokens, decoders of transcripts, and their losses.

Whisper's, wav2vec 2.0's and its kin's classes of transformers 5.23.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution, convolve
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.operations.rotary import rotary_tables
from memplan.graph.towers.state import Flow, from_batch, sensed
from memplan.model.towers.sounds import (
    FeaturesBody,
    FramesBody,
    GatedSignalBody,
    HalvedFramesBody,
    PositionConvolutionBody,
    ProjectedFramesBody,
    RowsBody,
    SignalBody,
    SignalNorm,
    SinesBody,
    SoundBody,
    TranscriptBody,
)
from memplan.model.towers.texts import OutputBody, TargetsBody


def signal(t: Tape, x: Tensor | None, body: SignalBody, flow: Flow) -> Tensor:
    """A convolution of what the batch brings, or of what the one before gave."""
    reads_rows = x is not None and not x.by_channel
    if x is None:
        seconds = t.options.audio_seconds
        flow.items = t.options.batch_size
        flow.length = body.length if seconds is None else seconds * body.rate
        length = flow.length
        flow.samples = length if body.rate else 0
        # Sound is not cast by the class: whoever trains in 16 bits brings it so.
        x = sensed(t, flow.items * body.channels * length, casts=body.casts)
        if body.leaf and not t.options.without_gradients and not t.frozen:
            x.requires_grad = True
        x = t.cast(x, t.compute)
    flow.length = (flow.length + 2 * body.padding - body.kernel) // body.stride + 1
    gives_rows = body.last or body.norm is SignalNorm.LAYER
    out = convolution(
        t, x, body.module, flow.items * flow.length, bias=body.bias,
        reads_rows=reads_rows, gives_rows=gives_rows,
    )  # fmt: skip
    out.by_channel = True
    channels = out.numel // flow.length // flow.items
    given = out
    if body.norm is SignalNorm.LAYER:
        out = layer_norm(t, given, body.norm_module, channels, between=not body.last)
    if body.norm is SignalNorm.GROUP:
        out = _group_norm(t, given, body.norm_module, flow.items * channels)
    t.touch(given)
    active = activation(t, out, body.activation)
    t.touch(out)
    return active


def features(t: Tape, body: FeaturesBody, flow: Flow) -> Tensor:
    """What the batch brings, in 16 bits where the model is."""
    seconds = t.options.audio_seconds
    flow.items = t.options.batch_size
    flow.length = body.length if seconds is None else seconds * body.rate
    return sensed(t, flow.items * flow.length * body.features)


def _group_norm(t: Tape, x: Tensor, module: str, groups: int) -> Tensor:
    """``torch.nn.GroupNorm``: in fp32 under autocast; keeps its input and two numbers a group."""
    weights = t.parameter(f"{module}.weight"), t.parameter(f"{module}.bias")
    if t.autocast is not None:
        x = t.cast(x, DType.FP32)
    out = t.tensor(x.numel, x.dtype)
    out.by_channel = x.by_channel
    mean, deviation = t.tensor(groups, x.dtype), t.tensor(groups, x.dtype)
    t.record(
        OperationKind.LAYER_NORM, (x, *weights), (out, mean, deviation),
        saves=(x, mean, deviation, *weights), gradients=(Gradient.FRESH,) * 3,
    )  # fmt: skip
    return out


def frames(t: Tape, x: Tensor, body: FramesBody, flow: Flow) -> Tensor:
    """Rows of a table that is not trained, added to every clip's.

    A name holds what the convolutions gave until the tower returns (transformers 5.23,
    ``WhisperEncoder.forward``, ``inputs_embeds``), and the rows' numbers where they are looked up.
    """
    table = t.parameter(f"{body.positions}.weight")
    flow.share(t, x)
    added: Tensor = table
    if body.looked_up:
        numbers, added = t.tensor(table.shape[0], DType.INT64), t.tensor(table.numel, table.dtype)
        t.record(OperationKind.ARANGE, (), (numbers,))
        t.record(
            OperationKind.EMBEDDING, (table, numbers), (added,), gradients=(Gradient.NONE,) * 2
        )
        flow.share(t, numbers)
    x.by_channel = True
    out = t.add(x, added)
    if body.cast_back:
        out = t.cast(out, x.dtype)
    return dropout(t, out, body.dropout)


def gated_signal(t: Tape, x: Tensor, body: GatedSignalBody, flow: Flow) -> Tensor:
    """``Conv1dSubsampler``'s step: edges are padded by half a kernel."""
    flow.length = (flow.length + 2 * (body.kernel // 2) - body.kernel) // body.stride + 1
    return gated_linear_unit(t, convolution(t, x, body.module, flow.items * flow.length))


def gated_linear_unit(t: Tape, x: Tensor) -> Tensor:
    """``torch.nn.GLU``: half of the channels times the sigmoid of the other half; keeps all."""
    out = t.tensor(x.numel // 2, x.dtype)
    t.record(OperationKind.GLU, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,))
    t.touch(x)
    return out


def scaled_with_sines(t: Tape, x: Tensor, body: SinesBody, flow: Flow) -> Tensor:
    """``Speech2TextEncoder``: its variables hold what was scaled, and the rows that are added."""
    if body.scaled:
        x = t.scale(x)
        flow.share(t, x)
    found = sine_rows(t, x, body.size, body.rows)
    if body.scaled:
        flow.share(t, found)
    return dropout(t, t.add(x, found), body.dropout)


def sine_rows(t: Tape, x: Tensor, size: int, rows: int) -> Tensor:
    """Rows of a buffer, looked up for each position of every sequence; no gradient is theirs."""
    dtype = DType.FP32 if t.autocast is not None else t.compute
    t.hold_buffer(allocated_bytes(rows * size, dtype))
    numbers = t.tensor(x.numel // size, DType.INT64)
    t.record(OperationKind.CUMSUM, (), (numbers,))
    found = t.tensor(x.numel, dtype)
    t.record(OperationKind.INDEX_SELECT, (numbers,), (found,))
    t.touch(numbers)
    return found


def halved_frames(t: Tape, x: Tensor) -> Tensor:
    """``torch.nn.AvgPool1d`` of two: keeps what it averages."""
    out = t.tensor(x.numel // 2, x.dtype)
    t.record(OperationKind.MEAN, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,))
    return out


def projected_frames(t: Tape, x: Tensor, body: ProjectedFramesBody, flow: Flow) -> Tensor:
    """A norm over the channels, a linear layer, masked stretches overwritten."""
    if body.norm:
        x = layer_norm(t, x, body.norm, body.features)
    if body.returned:
        t.hold(x)
        flow.returned.append(x)
    out = linear(t, x, body.linear, body.features, body.size, bias=True)
    out = dropout(t, out, body.dropout)
    if not body.mask:
        return out
    vector = t.parameter(body.mask)
    mask = t.tensor(flow.items * flow.length, DType.BOOL)
    t.record(OperationKind.MASK, (), (mask,))
    written = t.view(out, out.numel)
    t.record(
        OperationKind.MASKED_FILL_IN_PLACE, (out, vector), (written,), saves=(mask,),
        gradients=(Gradient.FRESH, out.storage.num_bytes),
    )  # fmt: skip
    return written


def position_convolution(t: Tape, x: Tensor, body: PositionConvolutionBody, flow: Flow) -> Tensor:
    """``Wav2Vec2PositionalConvEmbedding``: the weight is a direction times a length for each tap."""
    name = "pos_conv_embed"
    length, direction = (t.parameter(f"{name}.weight_norm.original{part}") for part in (0, 1))
    weight = t.tensor(direction.numel, direction.dtype)
    norms = t.tensor(length.numel, DType.FP32)
    t.record(
        OperationKind.DIV, (direction, length), (weight, norms), saves=(direction, length, norms),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    bias = t.parameter(f"{name}.conv.bias")
    padded = flow.length + 2 * (body.kernel // 2) - body.kernel + 1
    out = convolve(
        t, x, weight, bias, flow.items * padded, body.size,
        reads_rows=True, gives_rows=padded == flow.length,
    )  # fmt: skip
    t.touch(weight)
    if padded != flow.length:
        out = t.slice(out, flow.items * flow.length * body.size)
    out = activation(t, out, body.activation)
    flow.share(t, out)
    return dropout(t, t.add(x, out), body.dropout)


def targets(t: Tape, body: TargetsBody, flow: Flow) -> Tensor:
    """``shift_tokens_right``, then tokens and positions of every sequence."""
    options = t.options
    given = options.seq_len if body.source else options.target_seq_len
    flow.items, flow.length = options.batch_size, min(given, body.num_positions)
    rows = flow.items * flow.length
    ids = from_batch(t, rows, DType.INT64)
    if not body.source:
        flow.labels, ids = ids, t.tensor(rows, DType.INT64)
        t.record(OperationKind.SHIFT_RIGHT, (), (ids,))
        t.hold(ids)
    tokens = _rows_of(t, _table_of(t, body.tokens), ids, OperationKind.EMBEDDING)
    if body.scaled:
        tokens = t.scale(tokens)
    if body.source:
        flow.mask = None
    elif not body.positions:
        flow.hold_mask(t, flow.length)
    if body.positions:
        numbers = t.tensor(rows, DType.INT64)
        t.record(OperationKind.ARANGE, (), (numbers,))
        table = t.parameter(f"{body.positions}.weight")
        positions = _rows_of(t, table, numbers, OperationKind.INDEX)
        for each in (tokens, positions):
            flow.share(t, each)
        out = t.add(tokens, positions)
        flow.hold_mask(t, flow.length)
    elif body.sines:
        found = sine_rows(t, tokens, body.size, body.num_positions)
        if body.in_place:
            out = t.view(tokens, tokens.numel)
            t.record(
                OperationKind.ADD_IN_PLACE, (tokens, found), (out,),
                gradients=(Gradient.ALIAS, Gradient.NONE),
            )  # fmt: skip
        else:
            flow.share(t, tokens)
            flow.share(t, found)
            out = t.add(tokens, found)
    else:
        out = tokens
    flow.tables = None
    if body.rotary_dim:
        flow.tables = rotary_tables(t, flow.length, body.rotary_dim, out.dtype)
        flow.shared += flow.tables
    return dropout(t, out, body.dropout)


def _table_of(t: Tape, module: str) -> Parameter:
    """A module's table, be it an earlier one's that the model ties it to."""
    tied = next((weight for name, weight in t.segment.tied if name == module), None)
    return t.parameter(f"{module}.weight") if tied is None else tied


def _rows_of(t: Tape, table: Parameter, numbers: Tensor, kind: OperationKind) -> Tensor:
    out = t.tensor(numbers.numel * table.shape[-1], table.dtype)
    t.record(
        kind, (table, numbers), (out,), saves=(numbers,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def output(
    t: Tape, x: Tensor, body: OutputBody, flow: Flow, declared: dict[str, Parameter], *, tied: bool
) -> Tensor:
    """Logits over the vocabulary, and their cross-entropy as they are."""
    if tied and body.table:
        bias = t.parameter(f"{body.module}.bias") if body.bias else None
        logits = matmul_weight(t, x, declared[body.table], bias, module=body.module)
    else:
        logits = linear(t, x, body.module, body.size, body.rows, bias=body.bias)
    t.returned.append(logits)
    t.give_out(logits)
    full = t.cast(logits, DType.FP32) if body.upcast else logits
    return cross_entropy(t, full, flow.labels)


def transcript(t: Tape, x: Tensor, body: TranscriptBody, flow: Flow) -> Tensor:
    """CTC: fp32 log-probabilities, and a table of paths over frames and labels, kept."""
    x = dropout(t, x, body.dropout)
    logits = linear(t, x, body.module, body.size, body.rows, bias=True)
    t.returned.append(logits)
    t.give_out(logits)
    labels = min(t.options.target_seq_len, flow.length)
    from_batch(t, flow.items * labels, DType.INT64)
    heard = None
    if flow.samples:
        # Which samples are no padding, where nobody says so (``Wav2Vec2ForCTC.forward``).
        heard = t.tensor(flow.items * flow.samples, DType.INT64)
        t.record(OperationKind.MASK, (), (heard,))
    given = logits if logits.dtype is DType.FP16 else t.cast(logits, DType.FP32)
    log_probabilities = t.tensor(logits.numel, DType.FP32)
    t.record(
        OperationKind.LOG_SOFTMAX, (given,), (log_probabilities,), saves=(log_probabilities,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    paths = t.tensor(flow.items * flow.length * (2 * labels + 1), DType.FP32)
    each, loss = t.tensor(flow.items, DType.FP32), t.tensor(1, DType.FP32)
    t.record(
        OperationKind.NLL_LOSS, (log_probabilities,), (loss, paths, each),
        saves=(log_probabilities, paths, each), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=paths.storage.num_bytes,
    )  # fmt: skip
    if heard is not None:
        t.touch(heard)
    return loss


def write_sound(t: Tape, x: Tensor, body: SoundBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.sounds``."""
    match body:
        case SignalBody():
            return signal(t, x, body, flow)
        case FeaturesBody():
            return features(t, body, flow)
        case FramesBody():
            return frames(t, x, body, flow)
        case GatedSignalBody():
            return gated_signal(t, x, body, flow)
        case RowsBody():
            return t.contiguous(x)
        case SinesBody():
            return scaled_with_sines(t, x, body, flow)
        case HalvedFramesBody():
            return halved_frames(t, x)
        case ProjectedFramesBody():
            return projected_frames(t, x, body, flow)
        case PositionConvolutionBody():
            return position_convolution(t, x, body, flow)
        case TranscriptBody():
            return transcript(t, x, body, flow)
