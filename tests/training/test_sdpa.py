"""torch's own choice of attention kernel on each card, and its bytes, line by line.

``tests/data/attention_kernels.json`` holds what PyTorch's CUDA build answered.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.dtypes import DType
from memplan.estimator.recording import attention_kernel
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.paths import sdpa
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.memory.walks.backward_walk import BackwardWalk
from memplan.memory.walks.walk import ForwardWalk
from memplan.model.attention import AttentionSpec
from memplan.sources.cards.catalog import load_gpu
from memplan.training.choices_of_kernels.sdpa import sdpa_support
from memplan.training.setup import TrainingSetup

DATA = Path(__file__).parent.parent / "data" / "attention_kernels.json"
CASES = json.loads(DATA.read_text(encoding="utf-8"))["cases"]
LINES = [
    pytest.param(case, card, id=f"{card}: {case['name']}")
    for case in CASES
    for card in case["cards"]
]
DTYPES = {each.label: each for each in DType}
FIRST_PRODUCT_BACKWARD = {
    "v100": "bf16 d128 causal", "t4": "bf16 d128 causal", "a100": "bf16 d128 bool mask gqa",
    "l4": "bf16 d128 bool mask gqa", "h100": "fp32 d128 causal gqa", "b200": "fp32 d128 causal gqa",
}  # fmt: skip
"""The case of each card in which autograd's thread first made its cuBLAS workspace."""

CUDNN_GROUPED_UNITS = 2
"""dk and dv of every query head, which the file's stand-in for cuDNN did not ask for: cuDNN 9.20
itself does, on cards described to it."""


def made(t: Tape, numel: int, dtype: DType, *, trained: bool) -> Tensor:
    """A tensor of somebody else's: never freed, never counted."""
    tensor = t.tensor(numel, dtype, requires_grad=trained)
    tensor.storage.segment = -1
    return tensor


def recorded(case: dict[str, Any], card: str) -> tuple[Tape, Tensor]:
    dtype = DTYPES[case["dtype"]]
    tape = Tape(TapeOptions(weights=dtype, compute=dtype, sdpa=sdpa_support(load_gpu(card))))
    spec = AttentionSpec(
        num_heads=case["heads"], num_kv_heads=case["kv_heads"], head_dim=case["head_dim"],
        value_head_dim=case["value_head_dim"], causal=case["causal"], dropout=case["dropout"],
    )  # fmt: skip
    rows, length = case["batch"] * case["length"], case["length"]
    tape.begin("attention")
    query, key, value = (
        made(tape, rows * heads * width, dtype, trained=True)
        for heads, width in (
            (case["heads"], case["head_dim"]),
            (case["kv_heads"], case["head_dim"]),
            (case["kv_heads"], case["value_head_dim"]),
        )
    )
    mask = None
    if case["mask"] is not None:
        kind = DType.BOOL if case["mask"] == "bool" else dtype
        mask = made(tape, rows * length, kind, trained=False)
    grouped = case["heads"] != case["kv_heads"]
    shape = Shape(case["batch"], length, length, spec)
    return tape, sdpa(tape, query, key, value, shape, mask, grouped=grouped)


@pytest.mark.parametrize(("case", "card"), LINES)
def test_the_kernel_and_its_bytes(case: dict[str, Any], card: str) -> None:
    kernel, left, forward_peak, backward_peak = case["cards"][card]
    tape, out = recorded(case, card)
    assert attention_kernel(tape) == kernel
    segment = tape.segment
    # The result as the next layer reads it is no part of the dispatcher's call.
    while segment.operations[-1].name == "clone":
        out = segment.operations.pop().inputs[0]
    segment.output = out
    walk = ForwardWalk(segment, keep=True)
    forward = walk.run()
    segment.output = None
    backward = BackwardWalk(
        segment, walk.saves, in_place_sums=True, accumulated=set(), shared={out: (0, False)}
    ).run()
    unit = (
        case["batch"] * case["heads"] * case["length"] * case["head_dim"]
        * DTYPES[case["dtype"]].num_bytes
    )  # fmt: skip
    workspace = 0
    if FIRST_PRODUCT_BACKWARD[card] == case["name"]:
        workspace = workspace_bytes(load_gpu(card).compute_capability) // NUM_HANDLES
    if kernel == "cudnn" and case["heads"] != case["kv_heads"]:
        backward_peak += CUDNN_GROUPED_UNITS
    most = max(each.peak.total_bytes for each in backward.intervals) + workspace
    found = [forward.end.total_bytes, forward.peak.total_bytes, most]
    # Three decimals, and the allocator's rounding to 512 bytes, which tiny tensors are made of.
    slack = 0.0015 + 8 * 512 / unit
    assert [each / unit for each in found] == pytest.approx(
        [left, forward_peak, backward_peak], abs=slack
    )


@pytest.mark.reference
def test_every_line_of_the_reference_is_here(reference_dir: Path) -> None:
    lines = (reference_dir / "attention_kernels.txt").read_text(encoding="utf-8").splitlines()
    known = {(card, case["name"]): case["cards"][card] for case in CASES for card in case["cards"]}
    pattern = re.compile(
        r"(\w+) +(.+?) +(\w+)Backward0 +out\+saved +([\d.]+) fwd peak +([\d.]+) bwd peak +([\d.]+)"
    )
    names = {"Cudnn": "cudnn", "Flash": "flash", "Efficient": "efficient"}
    for line in lines:
        match = pattern.match(line)
        assert match is not None, line
        card, name, node, *figures = match.groups()
        kernel = names.get(node.removeprefix("ScaledDotProduct").removesuffix("Attention"), "math")
        assert known.pop((card, name)) == [kernel, *map(float, figures)]
    assert not known


def test_t5_in_bf16_keeps_its_scores_on_a_v100() -> None:
    """A trained position bias leaves the memory-efficient kernel, which takes no bf16 there."""
    found = {}
    for card in ("v100-32gb", "a100-80gb", "h100"):
        setup = TrainingSetup(num_gpus=8, zero_stage=3, precision="bf16-master")
        found[card] = memplan.estimate("t5-3b", setup, gpu=card)
    kernels = {card: each.attention_kernel for card, each in found.items()}
    assert kernels == {"v100-32gb": "math", "a100-80gb": "efficient", "h100": "efficient"}
    assert found["v100-32gb"].peak_bytes > 1.3 * found["a100-80gb"].peak_bytes
    usual = memplan.estimate("t5-3b", TrainingSetup(num_gpus=8, zero_stage=3), gpu="v100-32gb")
    assert usual.setup.chosen_precision.value == "fp16-master"
    assert usual.attention_kernel == "efficient"


@pytest.mark.parametrize(
    ("model", "attention", "kernel"),
    [
        ("granite-3.1-1b-a400m", None, "flash"), ("qwen1.5-moe-a2.7b", "eager", "eager"),
        ("gpt-oss-20b", "flash3", "flash"), ("gpt-oss-20b", None, "eager"),
        # Its weights are masked, cut and padded before they meet the values.
        ("longformer-large-4096", None, "eager"),
    ],
)  # fmt: skip
def test_a_routers_softmax_is_no_kernel_of_attention(
    model: str, attention: str | None, kernel: str
) -> None:
    setup = TrainingSetup(seq_len=512, attention=attention)  # type: ignore[arg-type]
    assert memplan.estimate(model, setup, gpu="h100").attention_kernel == kernel
