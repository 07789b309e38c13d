"""Models by the names that people write: copies of built-in models in other repositories, and their variants.

A repository's last part is taken apart at its hyphens. What says how weights are packed is taken off and said as a
``quantization_config``; what says how the model was tuned, or when, moves no size; if what is left names one built-in
model, that is the copy's shape. A config of the hub's is better: only owners who copy are believed without asking it.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from memplan.fast_dataclass import dataclass
from memplan.sources.about_models.registry import BuiltinModel, builtins_holding, find_builtin

COPYING_OWNERS = frozenset({
    "unsloth", "nousresearch", "mlx-community", "hugging-quants", "axolotl-quants", "thebloke", "huggyllama",
    "casperhansen", "techxgenus", "mistral-community", "alpindale", "neuralmagic", "redhatai", "modelcloud",
    "kaitchup", "isotr0py", "solidrust", "dphn-quants", "mhenrichsen", "models",
})  # fmt: skip
"""Who publishes others' models as they are; ``models`` is the folder that examples name."""
_NF4: Mapping[str, object] = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
"""As unsloth publishes its copies."""
_PACKED: tuple[tuple[str, Mapping[str, object]], ...] = (
    (r"-(unsloth-)?bnb-(4bit|nf4)(-bf16)?", _NF4),
    (r"-bnb-8bit", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    (r"-awq(-int4|-4bit)?", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    (r"-gptq(-int4|-4bit)?", {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    (r"-gptq-(int8|8bit)", {"quant_method": "gptq", "bits": 8, "group_size": 128}),
    (r"(-mlx)?-(bf16|fp16|16bit)|-mlx", {}),
)
"""Endings, and how the weights are packed then."""
_UNCOUNTED = re.compile(r"-(nvfp4|mxfp4|fp4|fp8)\b", re.IGNORECASE)
_MLX = re.compile(r"(-mlx)?-([3468]bit|mxfp4)(-dwq)?$")
_VARIANTS = frozenset({
    "instruct", "it", "chat", "base", "hf", "pt", "reasoning", "thinking", "sft", "dpo", "rl", "checkpoints",
    "pretrained", "preview", "text",
})  # fmt: skip
_DATED = re.compile(r"2[3-6](0[1-9]|1[0-2])|(0[1-9]|1[0-2])[0-3]\d|20[\d]{6}")
"""As publishers write months and days: 2507, 0324, 20250828."""
_OWNERS_WORD = re.compile(r"^(meta|nvidia|ibm)-(?=llama|granite)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A built-in model under another name."""

    model: BuiltinModel
    quantization: Mapping[str, object]
    """Its ``quantization_config``; empty: none."""
    remark: str
    """What the answer says of it."""
    is_owned_by_copier: bool

    def config(self) -> dict[str, object]:
        """The built-in's config, and how the copy is packed."""
        packed = {"quantization_config": dict(self.quantization)} if self.quantization else {}
        return {**self.model.config(), **packed}


def copy_of(name: str) -> Copy | None:
    """The built-in model that a repository's name says it is a copy or a variant of; None where it says none.

    >>> copy_of("unsloth/Llama-3.2-1B-Instruct-bnb-4bit").model.name
    'llama-3.2-1b'
    >>> copy_of("NousResearch/Meta-Llama-3-8B-Instruct").remark
    "NousResearch/Meta-Llama-3-8B-Instruct: the built-in llama-3-8b's shape, by its name"
    """
    parts = name.strip().strip("/").split("/")
    last, owner = parts[-1].lower(), parts[-2].lower() if len(parts) > 1 else ""
    plain, packed, mlx = _unpacked(last)
    found = _builtin(plain)
    if found is None:
        return None
    remark = f"{name}: the built-in {found.name}'s shape, by its name"
    if packed:
        remark += f", packed as its name says ({_words(packed)})"
    if mlx:
        remark += "; MLX's packing is not torch's and is not counted"
    own = found.hub_id.partition("/")[0].lower()
    return Copy(
        model=found, quantization=packed, remark=remark,
        is_owned_by_copier=owner in COPYING_OWNERS or owner == own,
    )  # fmt: skip


def packed_remark(name: str) -> str:
    """What the answer says of a built-in's repository whose weights are packed in a way that is not counted.

    >>> packed_remark("nvidia/DeepSeek-V3.2-NVFP4")
    'nvidia/DeepSeek-V3.2-NVFP4: packed as its name says (NVFP4), which is not counted: 16 bits a weight are'
    """
    found = _UNCOUNTED.search(name)
    if found is None:
        return ""
    return (
        f"{name}: packed as its name says ({found[1]}), which is not counted: 16 bits a weight are"
    )


def model_elsewhere(name: str) -> Copy | None:
    """The built-in model that a file means by a path of the machine it was written for; None where it is here.

    >>> model_elsewhere("/data/models/Qwen2.5-7B").model.name
    'qwen2.5-7b'
    """
    path = Path(name)
    if not (name.startswith(("/", "~", ".")) or len(path.parts) > _PARTS_OF_AN_ID):
        return None
    try:
        is_here = path.expanduser().exists()
    except (OSError, RuntimeError):
        is_here = False
    return None if is_here else copy_of(name)


_PARTS_OF_AN_ID = 2
"""An owner and a name."""


def _unpacked(name: str) -> tuple[str, Mapping[str, object], bool]:
    """A name without what says how its weights are packed, that, and whether MLX packs them."""
    for ending, packed in _PACKED:
        match = re.search(f"({ending})$", name)
        if match:
            return name[: match.start()], packed, False
    match = _MLX.search(name)
    if match:
        return name[: match.start()], {}, True
    return name, {}, False


def _builtin(name: str) -> BuiltinModel | None:
    """The built-in model of a name, variants left out; None where none or several of unlike shape have it."""
    exact = find_builtin(name) or find_builtin(_OWNERS_WORD.sub("", name))
    if exact is not None:
        return exact
    key = _key(name)
    owners = _keys().get(key, ())
    named = [find_builtin(each) for each in owners]
    models = [each for each in named if each is not None]
    if not models:
        return None
    alike = all(each.sizes == models[0].sizes for each in models)
    plain = [each for each in models if each.name == key]
    return (plain or models)[0] if alike or plain else None


@cache
def _keys() -> Mapping[str, tuple[str, ...]]:
    """Built-in names, by what is left of each of their names."""
    found: dict[str, dict[str, None]] = {}
    for model in builtins_holding(""):
        for each in (model.name, model.hub_id, *model.aliases):
            found.setdefault(_key(each.rpartition("/")[2].lower()), {})[model.name] = None
    return {key: tuple(names) for key, names in found.items()}


def _key(name: str) -> str:
    plain = _OWNERS_WORD.sub("", name)
    return "-".join(_told(plain)) or plain


def _told(name: str) -> Iterator[str]:
    """The words of a name that say which model it is."""
    for word in name.split("-"):
        if word and word not in _VARIANTS and not _DATED.fullmatch(word):
            yield word


def _words(packed: Mapping[str, object]) -> str:
    if packed.get("load_in_4bit"):
        return "bitsandbytes nf4"
    if packed.get("load_in_8bit"):
        return "bitsandbytes int8"
    return f"{packed['quant_method']}, {packed['bits']} bits"
