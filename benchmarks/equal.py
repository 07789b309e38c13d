"""Whether two versions say the same: every built-in, and a wide matrix of setups on one model of each kind.

    make equal BEFORE=<commit>                      # main, or any other
    make equal BEFORE=main EQUAL_FLAGS="--models llama-3.2-1b"

Both versions run in processes of their own and write their figures down: held, peak, phases, reserved, least
capacity, FLOPs, time, or the words with which a setup was refused. What differs is printed by figure, and
has to stand in ``docs/equality.md``, each difference with what settles it: a table whose first column is a
pattern of cases (``llama-3.2-1b ddp*``) and whose second names the figures. A difference that stands nowhere
makes it exit 1.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
EXPLAINED = HERE / "docs" / "equality.md"
Setup = dict[str, Any]
Row = dict[str, Any]

WIDE = (
    "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "gemma-2-2b", "gpt2", "bert-base",
    "t5-small", "qwen3-30b-a3b", "mamba-130m", "whisper-tiny",
)  # fmt: skip
"""One model of each kind, on which all of the matrix is tried."""
GPU = "a100-80gb"
SIZES: Setup = {"micro_batch_size": 2, "seq_len": 512}
ENGINES: Mapping[str, Setup] = {
    "ddp1": {"num_gpus": 1, "engine": "ddp"},
    "ddp8": {"num_gpus": 8, "engine": "ddp"},
    "zero2": {"num_gpus": 8, "engine": "deepspeed", "zero_stage": 2},
    "zero3": {"num_gpus": 8, "engine": "deepspeed", "zero_stage": 3},
    "fsdp": {"num_gpus": 8, "engine": "fsdp"},
    "fsdp1": {"num_gpus": 8, "engine": "fsdp1"},
}
PRECISIONS = {
    "ddp": ("fp32", "bf16", "bf16-amp", "fp16-amp"),
    "deepspeed": ("fp32", "bf16-master", "fp16-master"),
    "fsdp": ("fp32", "bf16", "bf16-mixed"),
    "fsdp1": ("fp32", "bf16-mixed"),
}
ADAPTERS: Mapping[str, object] = {
    "lora": {"lora": {"rank": 16}},
    "lora-all": {"lora": {"rank": 8, "targets": "all-linear", "dropout": 0.1}},
    "dora": {"lora": {"rank": 8, "targets": "all-linear", "dora": True}},
    "lora-saved": {"lora": {"rank": 8, "modules_to_save": ["lm_head", "embed_tokens"]}},
    "lora-some": {"lora": {"rank": 8, "layers": [0, 2]}},
    "lora-bias": {"lora": {"rank": 8, "lora_bias": True, "bias": "all"}},
    "ia3": {"ia3": {}},
    "prompt": {"prompt": {"tokens": 20}},
}
QLORA: Setup = {"adapter": {"lora": {"rank": 8, "targets": "all-linear"}}}
FIGURES = (
    "params", "held", "peak", "phases", "reserved", "least", "host", "flops", "time", "refused",
)  # fmt: skip


def one_gpu() -> Iterator[tuple[str, Setup]]:
    """What one GPU can be asked for: kernels, adapters, tasks, checkpointing."""
    plain: Setup = {"num_gpus": 1, "engine": "ddp"}
    for kernels in ("hf4", "torchtitan", "liger", "unsloth", "megatron"):
        for precision, again in product(
            ("bf16", "bf16-amp", "fp32"), ("none", "full", "selective")
        ):
            what = {"kernels": kernels, "precision": precision, "checkpointing": again}
            yield f"{kernels} {precision} {again}", {**plain, **what}
    for field, values in {
        "attention": ("flash", "flash3", "eager"),
        "norm": ("fused", "liger", "liger_apart"),
        "mlp": ("fused",),
        "rotary": ("liger", "unsloth", "complex"),
        "loss": (
            "shifted", "shifted_apart", "shifted_uncast", "chunked", "fused_linear", "fused", "liger",
            "flash_attn", "foak", "foak_rebound", "foak_uncast", "unsloth", "unsloth_fused", "cut",
            "torchtune", "trl", "tiled", "tiled_gradients",
        ),
        "packing": ("documents", "padding_free"),
        "compile": ("layer", "model"),
        "offload_activations": ("save-on-cpu", "streamed", "blocking"),
        "checkpointing": (0.5, "selective"),
        "dropout": (0.1, 0.0),
        "freeze": ("embeddings", "layers.0-1", "head", "norm,layers.1"),
        "fp8": ("torchao-tensorwise", "te-delayed"),
        "mlp_tiles": (4, 0),
        "outputs_held": (True,),
        "gradients_held": (True,),
        "upcast_outputs": (True,),
        "optimizer_in_backward": (True,),
        "job": ("dpo", "orpo", "simpo", "kto", "reward", "distillation", "ppo", "grpo"),
        "evaluation": (4,),
        "lengths": ("256:50%,512:50%",),
        "allocator": ("expandable",),
    }.items():  # fmt: skip
        for value, precision in product(values, ("bf16", "bf16-amp")):
            yield f"{field}={value} {precision}", {**plain, field: value, "precision": precision}
    for batch, length in ((1, 512), (4, 100), (3, 2000)):
        what = {"micro_batch_size": batch, "seq_len": length}
        for attention in ("sdpa", "eager"):
            yield f"b{batch} s{length} {attention}", {**plain, **what, "attention": attention}


def adapted() -> Iterator[tuple[str, Setup]]:
    """Adapters and quantized bases under every engine."""
    for (engine, given), (name, adapter) in product(ENGINES.items(), ADAPTERS.items()):
        for again in ("none", "full"):
            setup = {**given, "adapter": adapter, "checkpointing": again}
            yield f"{engine} {name} {again}", setup
    for engine, codes in product(("ddp1", "fsdp", "zero3"), ("nf4", "int8")):
        for again, dora in product(("none", "full"), (False, True)):
            adapter = {"lora": {"rank": 8, "targets": "all-linear", "dora": dora}}
            what = {"quantize": codes, "checkpointing": again, "adapter": adapter}
            yield f"{engine} {codes} {again} dora={dora}", {**ENGINES[engine], **what}
    for kernels, again in product(("liger", "unsloth"), ("none", "full")):
        what = {"kernels": kernels, "checkpointing": again, **QLORA}
        yield f"lora {kernels} {again}", {**ENGINES["ddp1"], **what}


def split() -> Iterator[tuple[str, Setup]]:
    """Models whose layers, sequences or depth several ranks share."""
    fsdp, accumulated = ENGINES["fsdp"], {"gradient_accumulation_steps": 4}
    for degree, sequence, loss in product((2, 4), (False, True), (False, True)):
        what = {"tensor_parallel": degree, "sequence_parallel": sequence, "loss_parallel": loss}
        for precision, again in product(("bf16-mixed", "bf16", "fp32"), ("none", "full")):
            kept = {"precision": precision, "checkpointing": again}
            yield f"tp{degree} {sequence} {loss} {precision} {again}", {**fsdp, **what, **kept}
    for kernels in ("torchtitan", "liger"):
        what = {"tensor_parallel": 2, "sequence_parallel": True, "kernels": kernels}
        yield f"tp2 {kernels}", {**fsdp, **what}
    yield "tp2 lora", {**fsdp, "tensor_parallel": 2, "adapter": {"lora": {"rank": 8}}}
    for stage in (1, 2):
        what = {"engine": "deepspeed", "zero_stage": stage, "num_gpus": 8, "tensor_parallel": 2}
        yield f"autotp zero{stage}", what
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zbv"):
        for engine in ("ddp8", "fsdp", "zero2"):
            virtual = 1 if schedule in ("gpipe", "1f1b") else 2
            what = {
                "pipeline_parallel": 2,
                "pipeline_schedule": schedule,
                "virtual_stages": virtual,
            }
            for again in ("none", "full"):
                name = f"pp {schedule} {engine} {again}"
                yield name, {**ENGINES[engine], **what, **accumulated, "checkpointing": again}
    for kind, degree, again in product(("ring", "all-to-all"), (2, 4), ("none", "full")):
        for engine in ("fsdp", "zero3"):
            what = {"context_parallel": degree, "context_parallel_kind": kind}
            for precision in PRECISIONS[str(ENGINES[engine]["engine"])]:
                kept = {"precision": precision, "checkpointing": again}
                name = f"cp {kind} {degree} {engine} {precision} {again}"
                yield name, {**ENGINES[engine], **what, **kept}
    yield "tp2 pp2 fsdp", {**fsdp, **accumulated, "tensor_parallel": 2, "pipeline_parallel": 2}
    for degree in (1, 2):
        yield (
            f"megatron tp{degree}",
            {"engine": "megatron", "num_gpus": 8, "tensor_parallel": degree},
        )


def matrix() -> Iterator[tuple[str, Setup]]:
    """Every setup of the matrix, with what it is called."""
    for (name, engine), again, attention in product(
        ENGINES.items(), ("none", "full"), ("sdpa", "eager")
    ):
        for precision in PRECISIONS[str(engine["engine"])]:
            what = {"precision": precision, "checkpointing": again, "attention": attention}
            yield f"{name} {precision} {again} {attention}", {**engine, **what}
    yield from one_gpu()
    yield from adapted()
    yield from split()


def short() -> Iterator[tuple[str, Setup]]:
    """What every built-in is tried with."""
    yield "ddp1 bf16-amp", {**ENGINES["ddp1"], "precision": "bf16-amp"}
    yield "fsdp full", {**ENGINES["fsdp"], "checkpointing": "full"}


TASKS = ("base", "sequence-classification", "token-classification")


def figures(memplan: Any, model: Any, setup: Setup) -> Row:
    """What one version says of a setup."""
    try:
        found = memplan.estimate(model, memplan.TrainingSetup(**{**SIZES, **setup}), gpu=GPU)
    except memplan.MemplanError as error:
        return {"refused": str(error)}
    try:
        time_s = round(found.time.expected_s, 9)
    except memplan.MemplanError as error:
        time_s = str(error)
    return {
        "params": found.num_params, "held": found.held_bytes, "peak": found.peak_bytes,
        "phases": {name: each.peak_bytes for name, each in found.phases.items()},
        "reserved": found.reserved_bytes, "least": found.required_bytes, "host": found.host_bytes,
        "flops": found.flops.total, "time": time_s,
    }  # fmt: skip


def record(path: Path, wide: tuple[str, ...], *, all_models: bool, only: str) -> None:
    """Write the figures of the version on the path, a line a case."""
    import memplan

    names = [each.name for each in memplan.models()] if all_models else []
    with path.open("w") as out:
        for name in dict.fromkeys((*wide, *names)):
            cases = list(matrix() if name in wide else short())
            for task in (None, *(TASKS if name in wide else ())):
                try:
                    model = memplan.load_model(name, task=task)
                except memplan.MemplanError:
                    continue
                for case, setup in cases if task is None else short():
                    label = f"{name}{'' if task is None else ':' + task} {case}"
                    if fnmatch(label, f"*{only}*"):
                        row = {"case": label, **figures(memplan, model, setup)}
                        out.write(json.dumps(row) + "\n")
            out.flush()


def read(path: Path) -> dict[str, Row]:
    """The figures of a file, by case."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {row["case"]: row for row in rows}


def explained() -> list[tuple[str, frozenset[str]]]:
    """Patterns of cases whose differences are settled, and of which figures."""
    found = []
    for line in EXPLAINED.read_text().splitlines() if EXPLAINED.exists() else ():
        match = re.match(r"\| `([^`]+)` \| ([^|]+) \|", line)
        if match:
            found.append((match[1], frozenset(match[2].replace(",", " ").split())))
    return found


def compare(before: Path, after: Path) -> int:
    """Print what differs; 1 where a difference is not explained."""
    old, new = read(before), read(after)
    settled = explained()
    counts: Counter[str] = Counter()
    left: dict[str, list[str]] = defaultdict(list)
    for case in old.keys() & new.keys():
        one, other = old[case], new[case]
        counts["cases"] += 1
        for name in FIGURES:
            if one.get(name) == other.get(name):
                counts[name] += 1
                continue
            words = f"{case}: {one.get(name)} -> {other.get(name)}"
            if any(fnmatch(case, pattern) and name in figures for pattern, figures in settled):
                counts["explained"] += 1
            else:
                left[name].append(words)
    for name, cases in left.items():
        print(f"{name}: {len(cases)} differ and are not in {EXPLAINED.name}")
        print("\n".join(f"  {each}" for each in sorted(cases)[:12]))
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    for case in old.keys() ^ new.keys():
        print(f"only in one of them: {case}")
    return 1 if left or old.keys() != new.keys() else 0


def run(folder: Path, out: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    """Record a version's figures in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-P", __file__, "--record", str(out), *flags]
    return subprocess.Popen(command, env=environment, cwd=folder)


def check_out(commit: str, folder: Path) -> None:
    """Another commit, with its compiled core."""
    subprocess.run(
        ["git", "-C", HERE, "worktree", "add", "--quiet", "--detach", folder, commit], check=True
    )
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, check=False, capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?", help="a commit")
    parser.add_argument("--models", default=",".join(WIDE), help="that see all of the matrix")
    parser.add_argument("--all", action="store_true", help="every built-in too, with two setups")
    parser.add_argument("--only", default="", help="a part of a case's name")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    wide = tuple(asked.models.split(","))
    if asked.record is not None:
        record(asked.record, wide, all_models=asked.all, only=asked.only)
        return 0
    if asked.before is None:
        parser.error("name a commit to compare with")
    flags = ["--models", asked.models, "--only", asked.only, *(["--all"] if asked.all else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_out(asked.before, folder / "before")
        try:
            runs = [run(folder / "before", folder / "old", flags), run(HERE, folder / "new", flags)]
            if any(each.wait() for each in runs):
                return 2
            return compare(folder / "old", folder / "new")
        finally:
            subprocess.run(
                ["git", "-C", HERE, "worktree", "remove", "--force", folder / "before"], check=True
            )


if __name__ == "__main__":
    sys.exit(main())
