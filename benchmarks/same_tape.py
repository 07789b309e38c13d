"""Whether a class says the same as the reader and the writers that it is to replace: seen in seconds.

    python benchmarks/same_tape.py deepseek_v3 --reader latents                 # the type's class defaults, small
    python benchmarks/same_tape.py gpt2 --reader gpt --config my.json --show    # operations that differ, too

While both live, a model is read by ``memplan.families.READER`` and by its class. Figures of a short matrix of
setups are compared, and of a few tapes every operation: what it reads and makes, what it keeps, what dies
behind it. ``make equal`` compares two commits, for what a class alone cannot say.
"""

import argparse
import difflib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import equal

import memplan
from memplan.classes.registry import base_class
from memplan.dtypes import DType
from memplan.families import index, read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Operation, Segment
from memplan.graph.core.tensors import Storage
from memplan.graph.model import record_model
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.defaults import class_defaults
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Kernels

TASKS = (Task.BASE, Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
DEPTH = 3
"""Layers: the first, the last and one between them, which are the kinds that a stack of equal layers has."""
SIZES = {"micro_batch_size": 2, "seq_len": 256}


def read(config: dict[str, Any], reader: str, task: Task | None) -> ModelSpec:
    """A config's model, by a module of ``memplan.families``."""
    model_type = config["model_type"]
    kept = index.FAMILY_MODULES.get(model_type)
    index.FAMILY_MODULES[model_type] = reader
    try:
        return read_model(
            config, source="config", name=model_type, defaults=class_defaults(), task=task
        )
    finally:
        if kept is None:
            del index.FAMILY_MODULES[model_type]
        else:
            index.FAMILY_MODULES[model_type] = kept


def setups(*, wide: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """A short matrix, or that of ``make equal``."""
    if wide:
        yield from equal.matrix()
        return
    engines = {name: equal.ENGINES[name] for name in ("ddp1", "zero3", "fsdp")}
    for (name, engine), again, attention in product(
        engines.items(), ("none", "full"), ("sdpa", "eager")
    ):
        for precision in equal.PRECISIONS[str(engine["engine"])]:
            what = {"precision": precision, "checkpointing": again, "attention": attention}
            yield f"{name} {precision} {again} {attention}", {**engine, **what}
    fsdp = equal.ENGINES["fsdp"]
    for name, adapter in equal.ADAPTERS.items():
        yield f"adapter {name}", {**equal.ENGINES["ddp1"], "adapter": adapter}
    yield "nf4", {**equal.ENGINES["ddp1"], "quantize": "nf4", **equal.QLORA}
    yield "tp2", {**fsdp, "tensor_parallel": 2}
    yield "tp2 sequence", {**fsdp, "tensor_parallel": 2, "sequence_parallel": True}
    yield "tp4 lora", {**fsdp, "tensor_parallel": 4, "adapter": {"lora": {"rank": 8}}}
    yield "autotp", {"engine": "deepspeed", "zero_stage": 1, "num_gpus": 8, "tensor_parallel": 2}
    yield "pp2", {**fsdp, "pipeline_parallel": 2, "gradient_accumulation_steps": 4}
    for kind in ("ring", "all-to-all"):
        yield f"cp {kind}", {**fsdp, "context_parallel": 2, "context_parallel_kind": kind}
    for kernels in ("hf4", "liger", "unsloth", "torchtitan"):
        yield f"kernels {kernels}", {**equal.ENGINES["ddp1"], "kernels": kernels}
    for packing in ("documents", "padding_free"):
        yield f"packing {packing}", {**equal.ENGINES["ddp1"], "packing": packing}
    yield "compile", {**equal.ENGINES["ddp1"], "compile": "layer"}


def differing(old: ModelSpec, new: ModelSpec, *, wide: bool) -> dict[str, list[str]]:
    """By figure, the setups in which it differs."""
    found: dict[str, list[str]] = defaultdict(list)
    for case, setup in setups(wide=wide):
        one, other = (equal.figures(memplan, each, {**SIZES, **setup}) for each in (old, new))
        found["cases"].append(case)
        for name in equal.FIGURES:
            if one.get(name) != other.get(name):
                found[name].append(f"{case}: {one.get(name)} -> {other.get(name)}")
    return found


def lines(segment: Segment) -> Iterator[str]:
    """A segment's operations: what each reads, makes and keeps, and what dies behind it."""
    yield f"== {segment.name} x{segment.repeat} {'checkpointed' if segment.checkpointed else ''}"
    yield f"   parameters {' '.join(each.name for each in segment.parameters)}"
    entered, left = ([name for _, name in each] for each in (segment.entered, segment.left))
    yield f"   entered {entered} left {left}"
    makers: dict[Storage, str] = {}
    for operation in segment.operations:
        for each in operation.outputs:
            makers.setdefault(each.storage, f"{operation.kind}:{each.storage.num_bytes}")
    for position, operation in enumerate(segment.operations):
        yield f"   {one_line(operation, makers)}"
        gone = [
            each for each in makers
            if each.last_read == position and each.segment == segment.index
        ]  # fmt: skip
        if gone:
            yield f"      - {' '.join(sorted(makers[each] for each in gone))}"


def one_line(operation: Operation, makers: dict[Storage, str]) -> str:
    """What an operation reads, makes and keeps."""
    reads = " ".join(str(each.numel) for each in operation.inputs)
    made = " ".join(f"{each.numel}.{each.dtype.value}" for each in operation.outputs)
    kept = " ".join(makers.get(each, "given") for each in operation.saved)
    gradients = " ".join(map(str, operation.gradients))
    scratch = f"{operation.forward_scratch}/{operation.backward_scratch}"
    return (
        f"{operation.kind} {reads} -> {made} | {kept} | {gradients} | {scratch} | {operation.flops}"
    )


def tapes(old: ModelSpec, new: ModelSpec) -> Iterator[tuple[str, list[str]]]:
    """What differs of a few tapes, operation by operation."""
    ways = {
        "bf16 sdpa": TapeOptions(batch_size=2, seq_len=64, compute=DType.BF16),
        "fp32 sdpa": TapeOptions(batch_size=1, seq_len=64, compute=DType.FP32),
        "autocast eager checkpointed": TapeOptions(
            batch_size=2, seq_len=64, compute=DType.FP32, autocast=DType.BF16,
            kernels=Kernels(attention=AttentionKernel.EAGER),
        ),
    }  # fmt: skip
    for name, options in ways.items():
        one, other = (list(tape_lines(each, options)) for each in (old, new))
        yield name, list(difflib.unified_diff(one, other, lineterm="", n=1))


def tape_lines(model: ModelSpec, options: TapeOptions) -> Iterator[str]:
    """A tape, or why there is none."""
    try:
        segments = record_model(model, options).segments
    except memplan.MemplanError as error:
        yield f"refused: {error}"
        return
    for segment in segments:
        yield from lines(segment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("type")
    parser.add_argument("--reader", required=True)
    parser.add_argument("--config", action="append", default=[], help="JSON, or a file of it")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--task", default=None)
    asked = parser.parse_args()
    bad = False
    for given in asked.config or ["{}"]:
        text = given if given.startswith("{") else Path(given).read_text()
        config = {"num_hidden_layers": asked.depth, **json.loads(text), "model_type": asked.type}
        tasks = (None, *(list(base_class(asked.type).tasks)[1:] or TASKS))
        for task in tasks if asked.task is None else (Task(asked.task),):
            try:
                old = read(config, asked.reader, task)
            except memplan.MemplanError as error:
                print(f"{asked.type} {task}: refused: {error}")
                continue
            new = read(config, "written_once", task)
            print(f"{asked.type} {new.task.value}")
            if old.num_params != new.num_params:
                print(f"  {old.num_params} parameters -> {new.num_params}")
            for name, diff in tapes(old, new):
                print(f"  {name}: {sum(each[:1] in '+-' for each in diff)} lines differ")
                if asked.show:
                    print("\n".join(f"    {each}" for each in diff))
            found = differing(old, new, wide=asked.wide) if not asked.show else {}
            for name, cases in found.items():
                if name == "cases":
                    continue
                bad = True
                print(f"  {name}: {len(cases)} of {len(found['cases'])} differ")
                for each in cases[: asked.most]:
                    print(f"    {each}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
