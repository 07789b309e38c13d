"""torchtitan's Python configurations (``models/*/config_registry.py``), under the names that its TOML files had.

Policies are classes there, sizes are tokens, and a model is a call of its folder's ``model_registry``; all else is called
as it was. Source: torchtitan's ``config/configs.py``, ``trainer.py``, ``components/`` and ``distributed/activation_checkpoint.py``.
"""

from collections.abc import Mapping

from memplan.sources.python_files.values import ARGUMENTS, CALL, CLASS, FROM
from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys

_CHECKPOINTING = {
    "SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget",
}  # fmt: skip
_TRAINERS = (
    "Trainer.Config", "FluxTrainer.Config", "FaultTolerantTrainer.Config", "TransformersBackendConfig",
)  # fmt: skip
_PIECES = 8
"""Of ``ChunkedLossWrapper.Config.num_chunks``, and of the loss ``chunked`` here."""
_CONVERTERS = {
    "Float8LinearConverter": "float8", "MXFP8LinearConverter": "mx",
    "Float8GroupedExpertsConverter": "grouped_mm", "MXFP8GroupedExpertsConverter": "grouped_mm",
}  # fmt: skip
_REGISTRY, _ADAMW = "model_registry", "default_adamw"
_OF_REGISTRY = {"moe_comm_backend": "parallelism.expert_parallel_comm_backend"}
_TOKENS, _CONTEXT = "training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length"
_STEP, _PASSES = "training.num_tokens_per_train_step", "parallelism.num_pp_microbatches"
_STAGES, _SPLIT = "parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree"
_SIZES = {_TOKENS: 16384, _CONTEXT: 2048}
"""``TrainingConfig``'s own."""


def is_python(values: Mapping[str, object]) -> bool:
    """Whether it is what such a function makes."""
    return CLASS in values and "model_spec" in values


def as_toml(keys: Keys, found: Found) -> None:
    """Put what classes and calls say under the names that the reader knows."""
    trainer = str(keys.values[CLASS])
    if trainer not in _TRAINERS:
        keys.refuse(trainer, f"its configuration is not modelled; {', '.join(_TRAINERS)} are")
    _name_model(keys)
    _name_optimizer(keys)
    _name_checkpointing(keys)
    _name_loss(keys, found)
    _name_sizes(keys)
    if keys.values.get("validator", "") is None:
        del keys.values["validator"]
    for name in [each for each in keys.values if each.startswith("validator.")]:
        keys.values[name.replace("validator", "validation", 1)] = keys.values.pop(name)
    if "hf_model" in keys.values:
        keys.values["hf_transformers.model"] = keys.values.pop("hf_model")
    for name in [each for each in keys.values if each.endswith(f".{CALL}")]:
        place, called = name.removesuffix(f".{CALL}"), keys.values.get(name)
        if _taken(keys, place):
            keys.values[place] = f"${{{called}(...)}}"
    keys.values = {
        name: value
        for name, value in keys.values.items()
        if name.rpartition(".")[2] not in (CLASS, ARGUMENTS)
    }


def _taken(keys: Keys, section: str) -> dict[str, object]:
    """What stands in a section, which is not looked at again."""
    below = f"{section}."
    names = [each for each in keys.values if each == section or each.startswith(below)]
    return {each.removeprefix(below): keys.values.pop(each) for each in names}


def _name_model(keys: Keys) -> None:
    """The package that has the registry is the model's name, and the first argument its flavor."""
    said = _taken(keys, "model_spec")
    places = said.pop(ARGUMENTS, None)
    if said.pop(CALL, None) != _REGISTRY:
        keys.refuse(
            "model_spec",
            f"is read where it is a call of {_REGISTRY}: name a MODEL beside a file of one",
        )
    flavor = said.pop("flavor", places[0] if isinstance(places, list) and places else None)
    keys.values["model.name"] = str(said.pop(FROM, "")).rpartition(".")[2] or None
    keys.values["model.flavor"] = flavor
    _name_converters(keys, said.pop("converters", None))
    for name, value in said.items():
        keys.values[_OF_REGISTRY.get(name, f"model.{name}")] = value


def _name_converters(keys: Keys, said: object) -> None:
    """Those that replace layers by others, in 8 bits mostly; without a recipe ``rowwise``."""
    if said is None:
        return
    names: list[str] = []
    for each in said if isinstance(said, list) else [said]:
        converter = each if isinstance(each, dict) else {CLASS: each}
        named = str(converter.get(CLASS, "")).partition(".")[0]
        if named not in _CONVERTERS:
            keys.refuse("model.converters", f"{named:.60} is not modelled: leave it out")
        names.append(_CONVERTERS[named])
        if names[-1] == "float8":
            recipe = converter.get("recipe_name", "rowwise")
            keys.values["quantize.linear.float8.recipe_name"] = recipe
    keys.values["model.converters"] = names


def _name_optimizer(keys: Keys) -> None:
    """``default_adamw``, or groups of parameters, each with a class: the first that is not Adam's is named."""
    groups = keys.values.get("optimizer.param_groups")
    by_default = keys.values.get(f"optimizer.{CALL}") == _ADAMW or _ADAMW in str(groups)
    if by_default:
        for mark in (CALL, FROM, ARGUMENTS, "param_groups"):
            keys.values.pop(f"optimizer.{mark}", None)
    elif isinstance(groups, list):
        del keys.values["optimizer.param_groups"]
        names = [each.get("optimizer_name", "AdamW") for each in groups if isinstance(each, dict)]
        if len(names) < len(groups):
            keys.refuse(
                "optimizer.param_groups", "is read where its ParamGroupConfigs stand in this file"
            )
        others = [name for name in names if name not in ("Adam", "AdamW")]
        keys.values["optimizer.name"] = next(iter(others), "AdamW")


def _name_checkpointing(keys: Keys) -> None:
    """A policy is a class, and none is None; the selective one chooses operations."""
    section = "activation_checkpoint"
    keys.values.setdefault(f"{section}.selective_ac_option", "op")
    named = str(keys.values.get(f"{section}.{CLASS}", "")).partition(".")[0]
    if section in keys.values and keys.values[section] is None:
        keys.values[f"{section}.mode"] = "none"
        del keys.values[section]
    elif named in _CHECKPOINTING:
        keys.values[f"{section}.mode"] = _CHECKPOINTING[named]
    elif named and f"{section}.mode" not in keys.values:
        keys.refuse(section, f"{named:.60} is not modelled; {', '.join(_CHECKPOINTING)} are")


def _name_loss(keys: Keys, found: Found) -> None:
    """In pieces of the sequence, or whole; other losses are named."""
    said = _taken(keys, "loss")
    whole = said.get(CLASS) or said.get(CALL) or said.get("loss") or ""
    named = str(whole).partition(".")[0]
    if named == "ChunkedLossWrapper" and keys.values.get(_SPLIT, 1) != 1:
        found.notes.append(
            "loss ChunkedLossWrapper is counted whole beside tensor_parallel, where pieces of it are not modelled: the "
            "figures are upper bounds"
        )
    elif named == "ChunkedLossWrapper":
        found.fields["loss"] = "chunked"
        pieces = said.get("num_chunks", _PIECES)
        if pieces != _PIECES:
            found.fields["loss_tiles"] = pieces
    if named == "ChunkedLossWrapper":
        named = str(said.get(f"loss_fn.{CLASS}", "CrossEntropyLoss")).partition(".")[0]
    if named not in ("", "CrossEntropyLoss", "MSELoss"):
        found.left_out.append(f"loss {named:.60} (counted as cross-entropy)")


def _name_sizes(keys: Keys) -> None:
    """Tokens are sequences of the longest context; passes of a pipeline are of so many each."""
    older = {"training.seq_len", "training.local_batch_size"} & keys.values.keys()
    if older and not _SIZES.keys() & keys.values.keys():
        return
    tokens, context = (keys.values.pop(name, usual) for name, usual in _SIZES.items())
    for name, value in ((_TOKENS, tokens), (_CONTEXT, context)):
        if not isinstance(value, int) or value < 1:
            keys.refuse(name, f"{value!r:.80} is not known without running it: write its number")
    assert isinstance(tokens, int)
    assert isinstance(context, int)
    if tokens % context:
        keys.refuse(_TOKENS, f"{tokens} tokens are no whole number of sequences of {context}")
    micro, passes = tokens // context, keys.values.pop(_PASSES, 1)
    keys.values["training.seq_len"] = context
    if keys.values.get(_STAGES, 1) == 1:
        passes = 1
    if not isinstance(passes, int) or passes < 1:
        keys.refuse(_PASSES, f"{passes!r:.80} is not known without running it: write its number")
    keys.values["training.local_batch_size"] = micro * passes
    if keys.values.get(_STAGES, 1) != 1:
        keys.values["parallelism.pipeline_parallel_microbatch_size"] = micro
    whole = keys.values.pop(_STEP, -1)
    if isinstance(whole, int) and whole > 0:
        if whole % context:
            keys.refuse(_STEP, f"{whole} tokens are no whole number of sequences of {context}")
        whole //= context
    keys.values["training.global_batch_size"] = whole
    keys.values.setdefault("training.disable_cuda_graphs", False)
    keys.values["validation.local_batch_size"] = micro
    keys.values["validation.seq_len"] = context
