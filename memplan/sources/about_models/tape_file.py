"""A traced module as a small JSON file, which memplan reads without torch: ``my_model.tape.json``.

Sizes and tensors are written once and referred to by number; a step is a list of its parts. The file holds
shapes and names, no weights and no code.
"""

import json
from collections.abc import Mapping
from math import isnan
from typing import Any

from memplan.errors import ConfigError
from memplan.model.heads import HeadSpec, Task
from memplan.model.spec import ModelSpec
from memplan.model.traced import (
    SYMBOLS,
    Format,
    Program,
    Size,
    Step,
    StepKind,
    TracedModule,
    TracedParameter,
    Value,
)
from memplan.text import shown

FORMAT = "memplan.tape"
VERSION = 1
FAMILY = "traced"


def is_tape(found: Mapping[str, object]) -> bool:
    """Whether what was read is a traced module.

    >>> is_tape({"format": "memplan.tape"}), is_tape({"model_type": "llama"})
    (True, False)
    """
    return found.get("format") == FORMAT


def traced_spec(module: TracedModule, *, name: str, source: str) -> ModelSpec:
    """A traced module as a model: what is known of it is its program."""
    _, seq_len, target = module.example
    return ModelSpec(
        name=name,
        family=FAMILY,
        task=Task.OTHER,
        vocab_size=0,
        hidden_size=0,
        context_length=max(seq_len, target),
        stacks=(),
        head=HeadSpec(),
        traced=module,
        assumptions=(
            f"traced from {module.class_name} with torch {module.torch_version}",
            *(f"a value of {each} was taken for granted while tracing" for each in module.guesses),
        ),
        source=source,
    )


def tape_text(model: ModelSpec) -> str:
    """The file of a traced model.

    Raises ``ConfigError`` for a model that was not traced.
    """
    module = model.traced
    if module is None:
        msg = f"{model.name} is no traced module: give what `memplan.trace` returned"
        raise ConfigError(msg)
    found = {
        "format": FORMAT,
        "version": VERSION,
        "name": model.name,
        "class_name": module.class_name,
        "torch_version": module.torch_version,
        "example": module.example,
        "guesses": module.guesses,
        "parameters": [
            [each.name, each.shape, each.trainable, each.is_output] for each in module.parameters
        ],
        "programs": {name: _program_parts(program) for name, program in module.programs},
    }
    return json.dumps(found, separators=(",", ":"))


def _program_parts(program: Program) -> dict[str, Any]:
    return {
        "sizes": [each.terms for each in program.sizes],
        "values": [
            [each.shape, each.format.value, each.storage, each.strided, each.parameter, each.input]
            for each in program.values
        ],
        "steps": [
            [each.kind.value, each.name, each.inputs, each.outputs, each.settings]
            for each in program.steps
        ],
        "loss": program.loss,
        "outputs": program.outputs,
    }


def read_tape(found: Mapping[str, Any], *, name: str, source: str) -> ModelSpec:
    """The model of a file.

    Raises ``ConfigError`` where it is of another version, or broken.
    """
    if found.get("version") != VERSION:
        msg = (
            f"{source}: version: {found.get('version')!r} of a traced module is not known here, only {VERSION}: "
            "trace it anew, or with this version of memplan"
        )
        raise ConfigError(msg)
    try:
        module = _module(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{source}: this is no whole traced module ({type(error).__name__}: {error}): trace it anew"
        raise ConfigError(msg) from None
    given = found.get("name")
    return traced_spec(
        module, name=given if isinstance(given, str) and given else name, source=source
    )


def _module(found: Mapping[str, Any]) -> TracedModule:
    return TracedModule(
        class_name=str(found["class_name"]),
        torch_version=str(found["torch_version"]),
        example=_sizes_of_example(found["example"]),
        guesses=tuple(map(str, found["guesses"])),
        parameters=tuple(
            TracedParameter(
                name=str(name),
                shape=_numbers(shape, _MOST),
                trainable=bool(trainable),
                is_output=bool(output),
            )
            for name, shape, trainable, output in found["parameters"]
        ),
        programs=tuple((str(name), _program(each)) for name, each in found["programs"].items()),
    )


def _sizes_of_example(found: Any) -> tuple[int, ...]:
    batch, seq_len, target = _numbers(found, _MOST)
    return batch, seq_len, target


def _program(found: Mapping[str, Any]) -> Program:
    sizes = tuple(Size(tuple(_term(*each) for each in terms)) for terms in found["sizes"])
    values = tuple(
        Value(
            _numbers(shape, len(sizes)),
            Format(kind),
            _number(storage, _MOST),
            bool(strided),
            str(parameter),
            str(given),
        )
        for shape, kind, storage, strided, parameter, given in found["values"]
    )
    count = len(values)
    steps = tuple(
        Step(
            StepKind(kind),
            str(name),
            _numbers(inputs, count),
            _numbers(outputs, count),
            _settings(settings),
        )
        for kind, name, inputs, outputs, settings in found["steps"]
    )
    return Program(
        sizes=sizes,
        values=values,
        steps=steps,
        loss=_number(found["loss"], count),
        outputs=_numbers(found["outputs"], count),
    )


_MOST = 10**15
"""More than any number in a program is: elements of a tensor, tensors of a program."""
_MOST_POWER = 8
"""Of the batch or a length in a size: attention's scores have 2."""


def _term(numerator: object, denominator: object, powers: Any) -> tuple[int, int, tuple[int, ...]]:
    found = _numbers(powers, _MOST_POWER)
    if len(found) != len(SYMBOLS):
        msg = f"a size has {len(found)} powers, not {len(SYMBOLS)}"
        raise ValueError(msg)
    return _number(numerator, _MOST, least=-_MOST), _number(denominator, _MOST, least=1), found


def _settings(found: Any) -> tuple[tuple[str, object], ...]:
    return tuple((str(key), _setting(value)) for key, value in found)


def _setting(value: object) -> object:
    """What a call was given: a number, a word, or several of them."""
    if isinstance(value, list):
        return tuple(_setting(each) for each in value)
    if isinstance(value, dict) or (isinstance(value, float) and isnan(value)):
        msg = f"{shown(value)} is no argument of a call"
        raise TypeError(msg)
    return _number(value, _MOST, least=-_MOST) if type(value) is int else value


def _numbers(found: Any, end: int) -> tuple[int, ...]:
    return tuple(_number(each, end) for each in found)


def _number(found: object, end: int, *, least: int = 0) -> int:
    """A whole number from ``least`` to below ``end``."""
    if type(found) is not int or not least <= found < end:
        msg = f"{shown(found)} is no number from {least} to {end - 1}"
        raise ValueError(msg)
    return found
