"""What a model is given to train on: tokens, pictures, clips of sound, and what it learns from them.

The values are random. Their shapes are what the estimate takes for granted: a language model that sees is
given the tokens of its pictures among those of each sequence. The names are those of the arguments of
transformers' ``forward`` (its processors' outputs).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memplan.errors import SetupError
from memplan.estimator.recording import record, tape_options
from memplan.fast_dataclass import dataclass
from memplan.graph.towers.images import picture_size
from memplan.graph.towers.joining import tokens_seen
from memplan.graph.towers.media import pictures_of, sound_of
from memplan.model.sounds import SoundSpec
from memplan.model.spec import ModelSpec, Task
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup
from memplan.verify.on_torch.formats import FORMATS

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Draws the tensors of a batch."""

    config: Any
    """The class's own."""
    model: ModelSpec
    setup: TrainingSetup
    """With its lengths filled in."""
    device: str
    arguments: frozenset[str] = frozenset()
    """Of the class's ``forward``."""

    @property
    def num_rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.setup.micro_batch_size

    @property
    def seq_len(self) -> int:
        """Tokens of each."""
        return self.setup.seq_len or 1

    @property
    def vocab_size(self) -> int:
        """Of the text."""
        size: int = self.config.get_text_config().vocab_size
        return size

    def numbers(self, below: int, *shape: int) -> Any:
        """From 1 on: 0 is what padding is here, and a sequence without any is trained."""
        low = min(1, below - 1)
        return torch.randint(low, max(below, 1), shape, device=self.device)

    def signal(self, *shape: int, casts: bool) -> Any:
        """Pictures or sound; in the weights' format where the class does not cast what it is given."""
        precision = PRECISIONS[self.setup.chosen_precision]
        is_whole = casts or precision.autocast is not None
        dtype = torch.float32 if is_whole else FORMATS[precision.weights]
        return torch.rand(shape, dtype=dtype, device=self.device)


def batch_of(sampler: Sampler) -> Batch:
    """One micro-batch for any model that verify trains.

    Raises ``SetupError`` for one whose arguments are not known here.
    """
    model = sampler.model
    if model.join is not None:
        return _text_with_media(sampler)
    if model.stacks:
        return text(sampler)
    kind = class_name(sampler.config, model)
    for ending, make in BY_CLASS.items():
        if kind.endswith(ending):
            return make(sampler)
    raise _unknown(model)


def class_name(config: Any, model: ModelSpec) -> str:
    """transformers' class, as the config names it. Raises ``SetupError`` where it does not."""
    named = list(getattr(config, "architectures", None) or ())
    if len(named) != 1:
        msg = f"architectures: the config of {model.name} does not name the class to train: give it one name"
        raise SetupError(msg)
    return str(named[0])


def text(sampler: Sampler) -> Batch:
    """Random tokens, with what the task is trained on."""
    size, length = sampler.num_rows, sampler.seq_len
    tokens = sampler.numbers(sampler.vocab_size, size, length)
    task = sampler.model.task
    targets: Batch
    if task is Task.SEQ2SEQ_LM:
        target_length = sampler.setup.target_seq_len or length
        targets = {"labels": sampler.numbers(sampler.vocab_size, size, target_length)}
    elif task is Task.SEQUENCE_CLASSIFICATION:
        targets = {"labels": sampler.numbers(sampler.config.num_labels, size)}
    elif task is Task.TOKEN_CLASSIFICATION:
        targets = {"labels": sampler.numbers(sampler.config.num_labels, size, length)}
    elif task is Task.PRETRAINING:
        pairs = sampler.arguments & SENTENCE_PAIRS
        targets = {
            "labels": sampler.numbers(2, size, length),
            **{name: sampler.numbers(2, size) for name in sorted(pairs)},
        }
    elif task is Task.QUESTION_ANSWERING:
        ends = [sampler.numbers(length, size) for _ in range(2)]
        targets = {"start_positions": ends[0], "end_positions": ends[1]}
    else:
        targets = {"labels": tokens.clone()}
    return {"input_ids": tokens, **targets}


SENTENCE_PAIRS = frozenset({"next_sentence_label", "sentence_order_label"})
"""What says of two sentences whether one follows the other: a second loss of BERT's kin."""


def _classified_pictures(sampler: Sampler) -> Batch:
    return {
        "pixel_values": _square_pictures(sampler, sampler.num_rows),
        "labels": sampler.numbers(sampler.config.num_labels, sampler.num_rows),
    }


def _pictures_with_captions(sampler: Sampler) -> Batch:
    table = sampler.config.text_config.max_position_embeddings
    length = min(sampler.seq_len, table)
    return {
        "input_ids": sampler.numbers(sampler.vocab_size, sampler.num_rows, length),
        "pixel_values": _square_pictures(sampler, sampler.num_rows),
        "return_loss": True,
    }


def _transcribed(sampler: Sampler) -> Batch:
    """Labels as many as the estimate counts paths over: the target length, at most a frame each."""
    values = _sound(sampler)
    frames = values.shape[-1]
    for kernel, stride in zip(sampler.config.conv_kernel, sampler.config.conv_stride, strict=True):
        frames = (frames - kernel) // stride + 1
    labels = min(sampler.setup.target_seq_len or sampler.seq_len, frames)
    return {
        "input_values": values,
        "labels": sampler.numbers(sampler.config.vocab_size, sampler.num_rows, labels),
    }


def _dictated(sampler: Sampler) -> Batch:
    asked = sampler.setup.target_seq_len or sampler.seq_len
    length = min(asked, sampler.config.max_target_positions)
    return {
        "input_features": _sound(sampler),
        "labels": sampler.numbers(sampler.vocab_size, sampler.num_rows, length),
    }


BY_CLASS: Mapping[str, Callable[[Sampler], Batch]] = {
    "ForImageClassification": _classified_pictures,
    "CLIPModel": _pictures_with_captions,
    "SiglipModel": _pictures_with_captions,
    "ForCTC": _transcribed,
    "WhisperForConditionalGeneration": _dictated,
}
"""Of a model without a stack of text layers: the end of its class's name, and what it is given."""


def _text_with_media(sampler: Sampler) -> Batch:
    """Tokens, so many of each sequence a placeholder for what is seen or heard."""
    media = BY_FAMILY.get(sampler.model.family)
    if media is None:
        raise _unknown(sampler.model)
    placeholder = _placeholder(sampler)
    tokens = _plain_text(sampler)
    tape = record(sampler.model, tape_options(sampler.setup, None))
    seen = tokens_seen(tape, sampler.model)
    kinds = torch.zeros_like(tokens)
    number = sampler.setup.images_per_sample
    each = seen // number
    for start in range(0, number * (each + 1), each + 1):  # a token of the text between any two
        tokens[:, start : start + each] = placeholder
        kinds[:, start : start + each] = 1
    beside = dict.fromkeys(media.kinds, kinds)
    return {"input_ids": tokens, "labels": tokens.clone(), **beside, **media.make(sampler)}


PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")


def _placeholder(sampler: Sampler) -> int:
    """The id that stands for a picture's token; one of the vocabulary where the config has none in it."""
    for name in PLACEHOLDERS:
        if hasattr(sampler.config, name):
            found = getattr(sampler.config, name)
            if not isinstance(found, int) or found >= sampler.vocab_size:
                found = sampler.vocab_size - 1
                setattr(sampler.config, name, found)
            return found
    raise _unknown(sampler.model)


def _plain_text(sampler: Sampler) -> Any:
    """Tokens of which none means anything to the class."""
    meant = {
        value
        for name, value in vars(sampler.config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    tokens = sampler.numbers(sampler.vocab_size, sampler.num_rows, sampler.seq_len)
    plain = next(each for each in range(1, sampler.vocab_size) if each not in meant)
    for each in meant:
        tokens.masked_fill_(tokens == each, plain)
    return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """What a language model is given beside its tokens."""

    make: Callable[[Sampler], Batch]
    kinds: tuple[str, ...] = ()
    """Arguments that say of each token whether it is one of a picture."""


def _pictures(sampler: Sampler) -> Batch:
    return {"pixel_values": _square_pictures(sampler, _num_pictures(sampler))}


def _pictures_of_rows(sampler: Sampler) -> Batch:
    made = _square_pictures(sampler, _num_pictures(sampler))
    return {"pixel_values": made.unflatten(0, (sampler.num_rows, -1))}


def _sized_pictures(sampler: Sampler) -> Batch:
    made = _square_pictures(sampler, _num_pictures(sampler))
    return {"pixel_values": made, "image_sizes": torch.tensor([made.shape[-2:]] * len(made))}


def _cut_pictures(sampler: Sampler) -> Batch:
    """Patches of all pictures in one row, and how many each has down and across (Qwen-VL's processor)."""
    body = pictures_of(sampler.model)
    assert body is not None
    height, width = picture_size(sampler.setup.image_size, body)
    down, across = height // body.patch[0], width // body.patch[1]
    number = _num_pictures(sampler)
    vision = sampler.config.vision_config
    depth = getattr(vision, "temporal_patch_size", 1)
    of_a_patch = body.channels * depth * body.patch[0] * body.patch[1]
    return {
        "pixel_values": sampler.signal(number * down * across, of_a_patch, casts=body.casts),
        "image_grid_thw": torch.tensor([[1, down, across]] * number, device=sampler.device),
    }


def _clips(sampler: Sampler) -> Batch:
    return {"input_features": _sound(sampler)}


def _masked_clips(sampler: Sampler) -> Batch:
    made = _sound(sampler)
    heard = torch.ones(made.shape[0], made.shape[-1], dtype=torch.long, device=sampler.device)
    return {"input_features": made, "feature_attention_mask": heard}


_PACKED = Media(make=_cut_pictures, kinds=("mm_token_type_ids",))
BY_FAMILY: Mapping[str, Media] = {
    **dict.fromkeys(("llava", "aya_vision", "internvl"), Media(make=_pictures)),
    **dict.fromkeys(("gemma3", "paligemma"), Media(make=_pictures, kinds=("token_type_ids",))),
    **dict.fromkeys(("idefics3", "smolvlm"), Media(make=_pictures_of_rows)),
    "mistral3": Media(make=_sized_pictures),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"), _PACKED),
    "voxtral": Media(make=_clips),
    "qwen2_audio": Media(make=_masked_clips),
}
"""Of a language model that sees or hears, by ``model_type``."""


def _num_pictures(sampler: Sampler) -> int:
    return sampler.num_rows * sampler.setup.images_per_sample


def _square_pictures(sampler: Sampler, number: int) -> Any:
    body = pictures_of(sampler.model)
    if body is None:
        raise _unknown(sampler.model)
    height, width = picture_size(sampler.setup.image_size, body)
    return sampler.signal(number, body.channels, height, width, casts=body.casts)


def _sound(sampler: Sampler) -> Any:
    body = sound_of(sampler.model)
    if body is None or body.is_framed:
        raise _unknown(sampler.model)
    return sampler.signal(*_clip_shape(sampler, body), casts=body.casts)


def _clip_shape(sampler: Sampler, body: SoundSpec) -> tuple[int, ...]:
    if not body.rate:
        return sampler.num_rows, body.channels, body.length
    seconds = sampler.setup.audio_seconds
    return sampler.num_rows, body.length if seconds is None else seconds * body.rate


def _unknown(model: ModelSpec) -> SetupError:
    msg = (
        f"{model.name}: verify does not know yet what its class is given, or what its loss is: record a "
        "snapshot in a script of your own, and compare it with `memplan explain`"
    )
    return SetupError(msg)
