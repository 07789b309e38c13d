"""An optimizer that a stack names by its class."""

from collections.abc import Mapping

from memplan.errors import SetupError
from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.training.coercion import coerce_enum
from memplan.training.optimizers import Optimizer

_CLASSES: Mapping[str, str] = {
    "torch.optim.adamw": "adamw_torch", "torch.optim.adam": "adamw_torch",
    "torch.optim.sgd": "sgd", "torch.optim.adafactor": "adafactor", "adamw": "adamw_torch",
    "adam": "adamw_torch", "sgd": "sgd", "muon": "muon", "torch.optim.muon": "muon",
    "bitsandbytes.optim.pagedadamw": "paged_adamw_32bit",
    "bitsandbytes.optim.pagedadamw8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.adamw8bit": "adamw_8bit", "bitsandbytes.optim.adamw": "adamw_bnb_32bit",
    "bitsandbytes.optim.adamw32bit": "adamw_bnb_32bit", "bitsandbytes.optim.lion8bit": "lion_8bit",
    "torchao.optim.adamw8bit": "adamw_torch_8bit", "torchao.optim.adamw4bit": "adamw_torch_4bit",
    "torchao.prototype.low_bit_optim.adamw8bit": "adamw_torch_8bit",
    "torchao.prototype.low_bit_optim.adamw4bit": "adamw_torch_4bit",
    "transformer_engine.pytorch.optimizers.fused_adam.fusedadam": "te-adamw",
    "transformer_engine.pytorch.optimizers.fusedadam": "te-adamw", "fusedadam": "te-adamw",
}  # fmt: skip
"""Classes, in lower case, and what transformers' ``TrainingArguments`` call the same."""
_FORMS = {"adamw_torch": {"fused": "adamw-fused", "foreach": "adamw-foreach", "loop": "adamw-loop"}}
"""How torch's own may be asked for."""


def add_named_optimizer(
    keys: Keys, key: str, found: Found, given: Mapping[str, object], *, form: str = "foreach"
) -> None:
    """Set the optimizer that a key names; ``form`` is torch's implementation of it."""
    name = keys.text(key)
    if name is None:
        return
    spelled = _CLASSES.get(name.lower(), name)
    wanted = _FORMS.get(spelled, {}).get(form, spelled)
    try:
        found.fields["optimizer"] = coerce_enum("optimizer", wanted, Optimizer)
    except SetupError:
        if "optimizer" not in given:
            found.left_out.append(
                f"{key} {name} (its own states and step; adamw-fused's are counted)"
            )
