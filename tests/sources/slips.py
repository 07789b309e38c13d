"""Configs with a key left out or misspelt, and whether an answer to one says so."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

from memplan.errors import MemplanError
from memplan.model.spec import ModelSpec
from memplan.sources.about_models.defaults import class_defaults, known_keys
from memplan.sources.models import load_model

Path = tuple[str, ...]
"""Keys that lead to a nested config."""

OWN_MEANING = frozenset({
    # As many as there are query heads, or what the hidden size leaves for each.
    "num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "head_dim",
    "num_attention_heads_per_layer",
    # As wide as the hidden size, or as what the class makes of it.
    "word_embed_proj_dim", "alignment_intermediate_size", "projection_size", "qk_channels",
    "v_channels", "intermediate_size",
    # As deep as the encoder; as sparse as the number of sparse layers says.
    "num_decoder_layers", "encoder_sparse_step", "decoder_sparse_step",
    # None of it.
    "attn_layer_indices", "residual_block_indices", "window_block_indices", "moe_latent_size",
    "conv_kernel_size", "position_buckets", "num_ln_in_parallel_attn",
    # A pattern over the layers.
    "compress_ratios",
    # transformers' two, whatever the model.
    "num_labels",
})  # fmt: skip
"""Keys whose absence means something by itself: the class has no number of its own for them."""

FREE = frozenset({"id2label", "label2id", "quantization_config", "projector_patch_to_query_dict"})
"""Mappings whose keys are no sizes."""


def complete_config(model_type: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A config of this type that says everything its class would fill in, nested ones too."""
    config = {"model_type": model_type, **deepcopy(dict(row.get("defaults", {})))}
    for key, part_type in row.get("parts", {}).items():
        part = class_defaults().get(part_type) if part_type else None
        if part is not None:
            nested = complete_config(part_type, part)
            if "." in part_type:
                del nested["model_type"]  # a class without one
            config[key] = nested
    return config


def size_keys(config: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Where a config holds whole numbers, or lists of them."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key not in FREE:
                yield from size_keys(value, (*path, key))
        elif is_size(value) and not key.endswith(("token_id", "token_index")):
            yield path, key


def is_size(value: object) -> bool:
    if isinstance(value, list):
        return any(is_size(each) for each in value)
    return isinstance(value, int) and not isinstance(value, bool)


def part_of(config: dict[str, Any], path: Path) -> dict[str, Any]:
    for key in path:
        config = config[key]
    return config


def with_value(config: dict[str, Any], path: Path, key: str, value: object) -> dict[str, Any]:
    changed = deepcopy(config)
    part_of(changed, path)[key] = value
    return changed


def with_name(config: dict[str, Any], path: Path, key: str, name: str | None) -> dict[str, Any]:
    """The config with one key under another name; None leaves it out."""
    changed = deepcopy(config)
    part = part_of(changed, path)
    value = part.pop(key)
    if name is not None:
        part[name] = value
    return changed


def slips(key: str, *, everywhere: bool) -> Iterator[str]:
    """Ways to misspell a key: a letter lost, two swapped, one wrong; a plural made or lost."""
    words = key.split("_")
    for index, word in enumerate(words):
        other = word[:-1] if word.endswith("s") else f"{word}s"
        if len(other) > 1 and (everywhere or index in {0, len(words) - 1}):
            yield "_".join((*words[:index], other, *words[index + 1 :]))
    places = range(1, len(key)) if everywhere else (len(key) // 2,)
    for place in places:
        yield key[:place] + key[place + 1 :]
        yield key[: place - 1] + key[place] + key[place - 1] + key[place + 1 :]
        yield key[:place] + ("x" if key[place] != "x" else "y") + key[place + 1 :]


Sizes = tuple[tuple[int, ...], ...]
"""Shapes of all weights of a class, and how many layers there are of each kind."""


def sizes_of(model: ModelSpec) -> Sizes:
    """What its class declares: nothing need be recorded to know it."""
    assert model.blueprint is not None
    return model.blueprint.sizes(model)


def sizes_in(config: dict[str, Any]) -> Sizes:
    """The same of a config, which is changed several times."""
    return _read(json.dumps(config))[1]


@lru_cache(maxsize=2)
def _read(text: str) -> tuple[ModelSpec, Sizes]:
    model = load_model(json.loads(text))
    return model, sizes_of(model)


def is_silent(full: dict[str, Any], changed: dict[str, Any]) -> bool:
    """Whether a changed config makes other weights than the full one, and nothing says why."""
    model, sizes = _read(json.dumps(full))
    try:
        other = load_model(changed)
        said = set(other.assumptions) - set(model.assumptions)
        return not said and sizes_of(other) != sizes
    except MemplanError:
        return False


def silent_changes(config: dict[str, Any], *, everywhere: bool) -> list[str]:
    """Every size of a config whose loss or misspelling changes the answer in silence."""
    found = []
    for path, key in size_keys(config):
        part_type = str(part_of(config, path).get("model_type", ""))
        if key not in OWN_MEANING and is_silent(config, with_name(config, path, key, None)):
            found.append(f"{config['model_type']}: {'.'.join((*path, key))} left out")
        for name in slips(key, everywhere=everywhere):
            if name in part_of(config, path) or name in known_keys(part_type):
                continue
            if is_silent(config, with_name(config, path, key, name)):
                found.append(f"{config['model_type']}: {'.'.join((*path, key))} as {name}")
    return found
