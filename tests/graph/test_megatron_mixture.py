"""Megatron's mixture beside tensor parallelism: what one layer keeps, and the most its forward pass has.

Megatron-core 0.16.1's router, dispatcher and layer on PyTorch's CUDA build, as rank 0 of a fake group; products of experts and
the fused permutation, which are TransformerEngine's, were stood in for by functions that keep what those keep.
"""

from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Gradient
from memplan.graph.megatron.backends import TRANSFORMER_ENGINE
from memplan.graph.megatron.config import TransformerConfig
from memplan.graph.megatron.mixture import MoELayer, SharedExpertMLP
from memplan.graph.modules.handles import empty
from memplan.graph.modules.module import Site
from memplan.graph.modules.run import Run
from memplan.memory.walks.walk import ForwardWalk
from memplan.model.mixtures import MixtureSpec
from memplan.model.parameters import ModelPart
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.megatron import (
    MegatronLayers,
    RecomputeGranularity,
    RecomputeModule,
)
from memplan.training.splitting.parallelism import TensorParallel

# (TP, EP, ranks of each expert), (experts, hidden, width, chosen, tokens) -> kept, highest [bytes]
MEASURED = [
    ((1, 4, 1), (16, 1024, 512, 4, 2048), 46710784, 109789184),
    ((2, 4, 2), (16, 1024, 512, 4, 2048), 31760384, 130408448),
    ((2, 4, 1), (16, 1024, 512, 4, 2048), 23355392, 54894592),
    ((4, 2, 4), (8, 2048, 4096, 2, 4096), 88252416, 251871232),
    ((4, 1, 4), (8, 2048, 4096, 2, 4096), 88252416, 243482624),
    ((2, 8, 2), (8, 2048, 1024, 2, 4096), 67420160, 226885632),
]


@pytest.mark.parametrize(("degrees", "sizes", "kept", "highest"), MEASURED)
def test_a_layer(
    degrees: tuple[int, int, int], sizes: tuple[int, ...], kept: int, highest: int
) -> None:
    walked = walked_layer(degrees, sizes, MegatronLayers(expert_tensor_parallel_size=degrees[-1]))
    assert (walked.end.total_bytes, walked.peak.total_bytes) == (kept, highest)


def test_what_the_experts_activation_gives_is_computed_again() -> None:
    """``--recompute-modules moe_act``: the second product's input is dropped, a row for every expert that a token has."""
    degrees, sizes, kept, _ = MEASURED[0]
    _, _, width, chosen, tokens = sizes
    settings = MegatronLayers(
        recompute_granularity=RecomputeGranularity.SELECTIVE,
        recompute_modules=(RecomputeModule.MOE_ACT,),
    )
    walked = walked_layer(degrees, sizes, settings)
    assert kept - walked.end.total_bytes == tokens * chosen * width * DType.BF16.num_bytes


def walked_layer(
    degrees: tuple[int, int, int], sizes: tuple[int, ...], settings: MegatronLayers
) -> Any:
    """Its forward pass."""
    (tensor, spread, _), (experts, hidden, width, chosen, tokens) = degrees, sizes
    model = load_model(
        {
            "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": width,
            "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1,
            "num_local_experts": experts, "num_experts_per_tok": chosen, "vocab_size": 1000,
            "architectures": ["MixtralForCausalLM"],
        }
    )  # fmt: skip
    group = TensorParallel(degree=tensor, sequence=True) if tensor > 1 else None
    options = TapeOptions(
        batch_size=1, seq_len=tokens, compute=DType.BF16, weights=DType.BF16, decomposed=True,
        tensor_parallel=group, expert_ranks=spread,
        megatron=settings,
    )  # fmt: skip
    config = TransformerConfig.of(model, options, settings)
    spec = model.stacks[0].runs[0].layer.feed_forward
    assert isinstance(spec, MixtureSpec)
    tape, layer = Run(options, source="a layer"), MoELayer(config, spec, TRANSFORMER_ENGINE)
    layer.attach(Site())
    layer.site.run = tape
    tape.start("before", None, part=ModelPart.EMBEDDING)
    x = empty(tape, (tokens // tensor, 1, hidden), DType.BF16)
    table = tape.parameter("table", 8, 8)
    tape.record(OperationKind.EMBEDDING, (table,), (x.record,), gradients=(Gradient.FRESH,))
    tape.start("layer", x.record, part=ModelPart.LAYERS)
    made, _ = layer(x)
    tape.finish(made.record)
    return ForwardWalk(tape.segments[1], keep=True).run()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor_parallel": 2}, "wants it beside tensor_parallel"),
        ({"tensor_parallel": 4, "expert_tensor_parallel_size": 2}, "is not modelled beside"),
        ({"tensor_parallel": 2, "expert_tensor_parallel_size": 1}, "give expert_parallel"),
        ({"tensor_parallel": 2, "expert_parallel": 8}, "8 = 16 x 0"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, int], words: str) -> None:
    import memplan

    own = dict(fields)
    options = {name: own.pop(name) for name in ("expert_tensor_parallel_size",) if name in own}
    setup = TrainingSetup(
        engine="megatron", num_gpus=8, sequence_parallel=len(fields) > 1,  # type: ignore[arg-type]
        engine_options=options, **own,
    )  # fmt: skip
    with pytest.raises(SetupError, match=words):
        memplan.estimate("mixtral-8x7b", setup)


def test_a_gate_weighs_what_shared_experts_make() -> None:
    """``moe_shared_expert_gate``: backward reads each token's weight, and what was weighed."""
    model, tokens = load_model("qwen1.5-moe-a2.7b"), 512
    options = TapeOptions(
        batch_size=1, seq_len=tokens, compute=DType.BF16, weights=DType.BF16,
        megatron=MegatronLayers(),
    )  # fmt: skip
    assert options.megatron is not None
    config = TransformerConfig.of(model, options, options.megatron)
    spec = model.stacks[0].runs[0].layer.feed_forward
    assert isinstance(spec, MixtureSpec)
    assert spec.shared is not None
    kept = []
    for gate in (False, True):
        tape = Run(options, source="a layer")
        layer = SharedExpertMLP(config, spec.shared, TRANSFORMER_ENGINE, gate=gate)
        layer.attach(Site())
        layer.site.run = tape
        tape.start("layer", None, part=ModelPart.LAYERS)
        x = empty(tape, (tokens, 1, model.hidden_size), DType.BF16)
        made, _ = layer(x)
        tape.finish(made.record)
        kept.append(ForwardWalk(tape.segments[0], keep=True).run().end.total_bytes)
    assert kept[1] - kept[0] == 2 * tokens * model.hidden_size + 2 * tokens
