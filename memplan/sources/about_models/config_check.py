"""What a config does not say, and what of it is not read: said beside the figures, or refused.

A family's reader asks for what its class uses. Three things it cannot see, because it never asks
for them or gets an answer all the same: a size that the class fills in, a key that is one slip away
from an absent one, and keys that change a model's memory but that no family models.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from memplan.errors import ConfigError, did_you_mean
from memplan.model.read_log import DefaultRead, PartLog, ReadLog
from memplan.model.spec import Task
from memplan.sources.about_models.defaults import class_name, known_keys, named_elsewhere

Matters = Callable[[DefaultRead], bool]
"""Whether another value of a default would make another model."""

LETTERS_OF_A_SLIP = 8
"""A key of so many letters may hold one slip; one of twice as many, two."""


def check_keys(log: ReadLog, *, source: str, is_spec: bool, accept_unknown: bool) -> list[str]:
    """Refuse keys that must be slips; return what to say of those that are accepted.

    Of other people's configs, those are keys that nothing reads and that are most of the name of an
    absent one that something reads. A spec, written by hand, may hold no key that its class lacks.
    Raises ``ConfigError``.
    """
    said = []
    for part in _present(log):
        known = _known(part)
        unread = []
        unknown = [key for key in part.config if key not in known and not key.startswith("_")]
        given = {key for key, value in part.config.items() if value is not None}
        absent = [names for names in set(part.spellings.values()) if not names & given]
        for key in unknown:
            near = _nearest_absent(key, absent)
            if not near and not is_spec:
                if _may_be_size(key, part, log):
                    unread.append(f"{part.path}{key}")
                continue
            if not accept_unknown:
                hint = f" Did you mean {near!r}?" if near else did_you_mean(key, sorted(known))
                ending = "" if is_spec else " `allow_unknown_keys=True` reads on without it"
                msg = f"{source}: {part.path}{key}: is no key of {_kind(part)}.{hint}{ending}"
                raise ConfigError(msg)
            unread.append(f"{part.path}{key}")
        if unread:
            number = "is no key" if len(unread) == 1 else "are no keys"
            said.append(f"{', '.join(unread)}: {number} of {_kind(part)}, not read")
    return said


def check_unread_parts(log: ReadLog, *, source: str) -> None:
    """Refuse nested configs of a spec of which nothing is read. Raises ``ConfigError``."""
    for part in _present(log):
        for key, value in part.config.items():
            path = f"{part.path}{key}."
            if not isinstance(value, Mapping) or path in log.parts or key in _FREE_MAPPINGS:
                continue
            known = _ROTARY_KEYS if key in _ROTARY_MAPPINGS else frozenset[str]()
            for name in value:
                if name not in known:
                    hint = did_you_mean(str(name), sorted(known))
                    msg = f"{source}: {path}{name}: is not read.{hint}"
                    raise ConfigError(msg)


def default_notes(log: ReadLog, matters: Matters) -> list[str]:
    """Say which sizes are not the config's but its class's, in one line for each class."""
    groups: dict[tuple[str, str], list[str]] = {}
    absent: dict[str, str] = {}
    for read in log.defaults.values():
        if read.absent_part:
            absent.setdefault(f"{read.path}{read.absent_part}", read.model_type)
        elif matters(read):
            sizes = groups.setdefault((read.path, read.model_type), [])
            sizes.append(f"{read.key} {_said(read.value)}")
    notes = []
    for (path, model_type), sizes in groups.items():
        place = f"the config's {path.rstrip('.')}" if path else "the config"
        number = "defaults" if len(sizes) > 1 else "default"
        notes.append(f"{', '.join(sizes)}: not in {place}, {_owner(model_type)} {number}")
    notes += [
        f"{path}: not in the config, {_owner(model_type)} defaults"
        for path, model_type in absent.items()
    ]
    return notes


def _said(value: object) -> object:
    """A value as a config has it."""
    return str(value).lower() if isinstance(value, bool) else value


def unmodelled_notes(log: ReadLog, *, source: str) -> list[str]:
    """Say which keys change a model's memory and are not modelled. Raises ``ConfigError``."""
    notes = [note for part in _present(log) for note in _unmodelled(part, source=source)]
    notes += [
        f"{read.path}model_type {read.given!r}: read as {read.model_type}, which its outer class "
        "makes of it"
        for read in log.retyped
    ]
    notes += [
        f"{own}: {common} says something else, and decides, as in transformers"
        for own, common in log.overruled.items()
    ]
    return notes


def architecture_note(
    config: Mapping[str, object], model_type: str, task: Task, *, source: str
) -> str:
    """Say that no class is known under any name of ``architectures``; else nothing.

    Raises ``ConfigError`` where those are no names.

    >>> architecture_note({"architectures": ["LlamaForCausalLM"]}, "llama", Task.BASE, source="")
    ''
    """
    named = config.get("architectures")
    if named is None:
        return ""
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        msg = f"{source}: architectures: expected a list of names, got {named!r:.60}"
        raise ConfigError(msg)
    names = cast("list[str]", named)
    if not names or any(_is_class(name, model_type) for name in names):
        return ""
    listed = ", ".join(f"{name!r:.60}" for name in names[:3])
    return f"architectures {listed}: no known class of {model_type}, counted as {task.value}"


def type_note(config: Mapping[str, object], model_type: str) -> str:
    """Say that the type is not the config's own word; else nothing."""
    if config.get("model_type") is not None:
        return ""
    return f"model_type {model_type}: not in the config, taken from its architectures"


def _is_class(name: str, model_type: str) -> bool:
    """Whether transformers has a class of this name for a type, but for the letters' case."""
    stem = class_name(model_type).removesuffix("Config").removesuffix("Text").removesuffix("Vision")
    given, stem = (text.replace("_", "").lower() for text in (name, stem))
    return bool(stem) and given.startswith(stem) and given.endswith(_ENDINGS)


_ENDINGS = tuple(
    ending.lower()
    for ending in (
        "Model", "ModelWithHeads", "WithLMHead", "Backbone", "Encoder", "Transformer", "ForCTC",
        "ForRNNT", "ForTDT", "ForXVector", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration",
        "Classification", "Answering", "AnsweringSimple", "ForMultipleChoice", "ForPreTraining",
        "Prediction", "Detection", "Segmentation", "Estimation", "Recognition", "Retrieval",
        "ForMaskedImageModeling", "ForTextToSpeech", "ForSpeechToText", "ForSpeechToSpeech",
        "ForTextToText", "ForVisualReasoning", "ForContrastiveLearning", "ForGeneration",
        "ForMaskGeneration", "ForImageMatting", "ForRegression", "Alignment", "Matching",
        "ConvProcessing", "Fourier", "Learned", "WithTeacher", "WithProjection", "Decoder",
    )
)  # fmt: skip
"""How the names of transformers 5.23's model classes end."""


# -- keys ----------------------------------------------------------------------------------------


def _present(log: ReadLog) -> Iterator[PartLog]:
    """The parts that are in the file."""
    return (part for part in log.parts.values() if not part.is_absent)


def _known(part: PartLog) -> frozenset[str]:
    """Keys that a part's class has, or that something asked for."""
    known = frozenset(part.spellings).union(*map(known_keys, part.model_types))
    is_rotary = part.path.rstrip(".").rpartition(".")[2] in _ROTARY_MAPPINGS
    return known | _ROTARY_KEYS if is_rotary else known


def _kind(part: PartLog) -> str:
    names = sorted(filter(None, part.model_types))
    return f"a {names[0]} config" if names else "this part"


def _owner(model_type: str) -> str:
    name = class_name(model_type)
    return f"{name}'s" if name else "its class's"


def _nearest_absent(key: str, absent: list[frozenset[str]]) -> str:
    """The absent key that differs from this one in a slip or two; empty where none does."""
    given = _letters(key)
    found = [
        (distance, name)
        for names in absent
        for name in names
        if not _is_longer_name(key, name)
        and (distance := _num_slips(given, _letters(name))) <= _slips_allowed(name)
    ]
    return min(found, default=(0, ""))[1]


def _letters(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")


def _slips_allowed(name: str) -> int:
    return max(1, len(name) // LETTERS_OF_A_SLIP)


def _num_slips(given: str, name: str) -> int:
    """Letters left out, put in, replaced, or swapped with a neighbour.

    >>> _num_slips("hiddensise", "hiddensize"), _num_slips("hiddnesize", "hiddensize")
    (1, 1)
    """
    if abs(len(given) - len(name)) > len(name) // LETTERS_OF_A_SLIP + 1:
        return len(name)
    before: list[int] = []
    above = list(range(len(name) + 1))
    for row, letter in enumerate(given, 1):
        line = [row]
        for column, other in enumerate(name, 1):
            cost = min(
                above[column] + 1, line[column - 1] + 1, above[column - 1] + (letter != other)
            )
            if row > 1 < column and given[row - 2] == other and letter == name[column - 2]:
                cost = min(cost, before[column - 2] + 1)
            line.append(cost)
        before, above = above, line
    return above[-1]


def _is_longer_name(one: str, other: str) -> bool:
    """Whether one key is the other and more words: another thing's name (``vt_hidden_size``)."""
    words, others = set(one.split("_")), set(other.split("_"))
    return words < others or others < words


def _may_be_size(key: str, part: PartLog, log: ReadLog) -> bool:
    """Whether a key that is no slip may be meant for a size that the class filled in."""
    for read in log.defaults.values():
        if read.path == part.path and not read.absent_part:
            names = part.spellings.get(read.key, frozenset({read.key}))
            if names & named_elsewhere(key) or any(_is_longer_name(key, name) for name in names):
                return True
    return False


_ROTARY_MAPPINGS = frozenset({"rope_parameters", "rope_scaling"})
_ROTARY_KEYS = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "full_attention",
    "high_freq_factor", "long_factor", "long_mscale", "low_freq_factor", "mrope_interleaved",
    "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "short_mscale",
    "sliding_attention", "truncate", "type",
})  # fmt: skip
"""What transformers' rotary embeddings read of those."""
_FREE_MAPPINGS = frozenset({"id2label", "label2id", "quantization_config"})
"""Nested mappings whose keys are the user's own, or are named in the answer as a whole."""


# -- keys that are not modelled ------------------------------------------------------------------


def _unmodelled(part: PartLog, *, source: str) -> Iterator[str]:
    for key, meaning in _UNMODELLED.items():
        value = part.config.get(key)
        if key in part.spellings or not value or value in _USUAL.get(key, ()):
            continue
        shown = "" if isinstance(value, Mapping | list) else f" {value}"[:40]
        if key == "quantization_config" and isinstance(value, Mapping):
            from memplan.training.quantization_config import is_modelled, quantization_method

            if is_modelled(value):
                continue  # said with the answer: a setup decides what becomes of it
            shown = f" ({quantization_method(value):.40})"
        yield f"{part.path}{key}{shown}: {meaning}"
    for key in ("dtype", "torch_dtype"):
        if part.config.get(key) is not None:
            yield from _dtype_note(part.config[key], f"{part.path}{key}", source=source)


_UNQUANTIZED = "not read, weights are counted unquantized, in the setup's precision"
_RETURNED = "not read, what the model returns beside the loss is not counted"
_KERNEL = "not read, the setup's attention kernel is counted"
_UNMODELLED: Mapping[str, str] = {
    "quantization_config": _UNQUANTIZED,
    "quantization": _UNQUANTIZED,
    "compression_config": _UNQUANTIZED,
    "add_cross_attention": "not read, cross-attention is not counted",
    "pruned_heads": "not read, all heads are counted",
    "tie_encoder_decoder": "not read, encoder and decoder are counted apart",
    "torchscript": "not read, tied matrices are counted once",
    "chunk_size_feed_forward": "not read, the feed-forward network is counted in one piece",
    "gradient_checkpointing": "not read, the setup says what is recomputed",
    "output_hidden_states": _RETURNED,
    "output_attentions": _RETURNED,
    "attn_implementation": _KERNEL,
    "_attn_implementation": _KERNEL,
}
"""Keys of any transformers config that change parameters or bytes, and what is done instead."""
_USUAL: Mapping[str, tuple[str, ...]] = {
    "attn_implementation": ("sdpa",),
    "_attn_implementation": ("sdpa",),
}
"""Values that say what is counted anyway."""

_READ_DTYPES = ("float32", "float", "float16", "half", "bfloat16")
_OTHER_DTYPES = (
    "auto", "double", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "int4", "int8", "int16", "int32", "int64", "uint8",
)  # fmt: skip


def _dtype_note(value: object, place: str, *, source: str) -> Iterator[str]:
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    if name in _READ_DTYPES:
        return
    if name not in _OTHER_DTYPES:
        hint = did_you_mean(name or "", [*_READ_DTYPES, *_OTHER_DTYPES])
        msg = f"{source}: {place}: {value!r:.60} is no dtype of torch's.{hint}"
        raise ConfigError(msg)
    yield f"{place} {name}: not read, weights are counted in the setup's precision"
