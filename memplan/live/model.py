"""A model as it stands in memory: its config, its adapter, the format of its weights.

Names are those of transformers 5.23 (``PreTrainedModel.config``, ``_attn_implementation``) and peft 0.21 (``PeftModel.peft_config``,
``get_base_model``). Wrappers are taken off by the attribute that each keeps the module in: DDP's, DeepSpeed's and accelerate's
``module``, ``torch.compile``'s ``_orig_mod``, FSDP1's ``_fsdp_wrapped_module``; FSDP2 changes the class alone
(``FSDPLlamaForCausalLM``: torch 2.13, ``distributed/fsdp/_fully_shard``).
"""

from collections.abc import Mapping
from typing import Any

from memplan.errors import UsageError
from memplan.fast_dataclass import dataclass
from memplan.sources.about_models.plain import plain

_INSIDE = ("_fsdp_wrapped_module", "_orig_mod", "module")
"""Attributes in which wrappers keep what they wrap."""
_FSDP2 = "FSDP"
"""What FSDP2 puts before a class's name."""
_HALF = ("torch.bfloat16", "torch.float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveModel:
    """What is read off a model."""

    config: Mapping[str, object]
    """As its ``config.json`` would have it, its own class named."""
    adapter: Mapping[str, object] | None
    """As ``adapter_config.json`` would have it; None: it has none."""
    weights: str
    """The format of most weights, as torch writes it: ``torch.bfloat16``."""
    attention: str | None
    """transformers' name for what computes attention; None: not said."""
    num_params: int
    trainable_params: int
    is_checkpointed: bool = False
    """Whether its layers are run again in backward."""

    @property
    def is_half(self) -> bool:
        """Whether its weights are in 16 bits."""
        return self.weights in _HALF


def read_model(model: Any) -> LiveModel:
    """Look at a model. Raises ``UsageError`` for one without a config of transformers'."""
    bare = _configured(unwrapped(model))
    adapters = getattr(bare, "peft_config", None)
    base = unwrapped(bare.get_base_model()) if adapters else bare
    config = getattr(base, "config", None)
    if not hasattr(config, "to_dict"):
        msg = (
            f"{type(base).__name__} has no config of transformers': write it down first, "
            "memplan.check(memplan.trace(model, batch), ...)"
        )
        raise UsageError(msg)
    name = type(base).__name__
    name = name.removeprefix(_FSDP2) if hasattr(base, "unshard") else name
    values = plain(config.to_dict())  # type: ignore[union-attr]
    parameters = list(bare.parameters())
    return LiveModel(
        config={**values, "architectures": [name]},
        adapter=_active(bare, adapters) if adapters else None,
        weights=_weights(parameters),
        attention=getattr(config, "_attn_implementation", None),
        is_checkpointed=bool(getattr(base, "is_gradient_checkpointing", False)),
        num_params=sum(_numel(each) for each in parameters),
        trainable_params=sum(_numel(each) for each in parameters if each.requires_grad),
    )


def unwrapped(model: Any) -> Any:
    """The module inside of all wrappers."""
    return wrappers(model)[-1]


def wrappers(model: Any) -> list[Any]:
    """A model with all that wraps it, the outermost first, the bare module last."""
    found = [model]
    while True:
        inner = next((_child(found[-1], name) for name in _INSIDE if _wraps(found[-1], name)), None)
        if inner is None:
            return found
        found.append(inner)


def _wraps(model: Any, name: str) -> bool:
    """Whether it keeps a whole module under that name; a model of one's own may have a child called ``module`` as well."""
    return _child(model, name) is not None and not _has_config(model)


def _has_config(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "to_dict")


def _configured(bare: Any) -> Any:
    """The model of transformers' in a module that holds nothing else, such as Lightning's; else the module itself."""
    if _has_config(bare) or getattr(bare, "peft_config", None):
        return bare
    children = [
        each for each in (getattr(bare, "_modules", None) or {}).values() if each is not None
    ]
    held = [each for each in children if any(True for _ in each.parameters())]
    if len(held) == 1 and (_has_config(held[0]) or getattr(held[0], "peft_config", None)):
        return held[0]
    return bare


def _child(model: Any, name: str) -> Any:
    children = getattr(model, "_modules", None) or {}
    return children.get(name)


def _active(model: Any, adapters: Mapping[str, Any]) -> Mapping[str, object]:
    """The settings of the adapter that is trained."""
    chosen = getattr(model, "active_adapter", None)
    if not isinstance(chosen, str) or chosen not in adapters:
        chosen = next(iter(adapters))
    return plain(adapters[chosen].to_dict())


def _weights(parameters: list[Any]) -> str:
    """The format that most elements of floating point are in; codes are none."""
    counts: dict[str, int] = {}
    for each in parameters:
        name = str(each.dtype)
        if name.startswith(("torch.float", "torch.bfloat")):
            counts[name] = counts.get(name, 0) + each.numel()
    return max(counts, key=lambda name: counts[name]) if counts else ""


def _numel(parameter: Any) -> int:
    """Elements; of a weight that ZeRO-3 has taken apart, those of the whole (``ds_numel``), of packed codes, those they stand for."""
    whole = getattr(parameter, "ds_numel", None)
    if whole is not None:
        return int(whole)
    packed = getattr(getattr(parameter, "quant_state", None), "shape", None)
    if packed is not None:
        return int(packed.numel())
    return int(parameter.numel())
