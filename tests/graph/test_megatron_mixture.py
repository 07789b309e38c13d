"""Megatron's mixture beside tensor parallelism: what one layer keeps, and the most its forward pass has.

Megatron-core 0.16.1's router, dispatcher and layer on PyTorch's CUDA build, as rank 0 of a fake group; products of experts and
the fused permutation, which are TransformerEngine's, were stood in for by functions that keep what those keep.
"""

import pytest

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.local_sizes import local_layer
from memplan.graph.megatron.mixture import routed
from memplan.memory.walks.walk import ForwardWalk
from memplan.model.mixtures import MixtureSpec
from memplan.model.parameters import ModelPart
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.megatron import MegatronLayers
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
    (tensor, spread, each), (experts, hidden, width, chosen, tokens) = degrees, sizes
    model = load_model(
        {
            "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": width,
            "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1,
            "num_local_experts": experts, "num_experts_per_tok": chosen, "vocab_size": 1000,
            "architectures": ["MixtralForCausalLM"],
        }
    )  # fmt: skip
    spec = local_layer(model, model.stacks[0].runs[0].layer, tensor, each).feed_forward
    assert isinstance(spec, MixtureSpec)
    group = TensorParallel(degree=tensor, sequence=True) if tensor > 1 else None
    tape = Tape(
        TapeOptions(
            batch_size=1, seq_len=tokens, compute=DType.BF16, weights=DType.BF16, decomposed=True,
            tensor_parallel=group,
        ),
        source="a layer",
    )  # fmt: skip
    c = MegatronContext(
        tape=tape, settings=MegatronLayers(), degree=tensor, sequence=tensor > 1, hidden_size=hidden,
        context=1, is_ring=False, experts=spread, expert_degree=each, batch=1, seq_len=tokens,
    )  # fmt: skip
    tape.begin("before", part=ModelPart.EMBEDDING)
    x = tape.tensor(c.stream_tokens * hidden, DType.BF16)
    table = tape.parameter("table", 8, 8)
    tape.record(OperationKind.EMBEDDING, (table,), (x,), gradients=(Gradient.FRESH,))
    tape.end(x)
    tape.begin("layer", part=ModelPart.LAYERS, x=x)
    tape.end(routed(c, x, spec, "mlp"))
    walked = ForwardWalk(tape.segments[1], keep=True).run()
    # The statistics of the router's own choice are left out: 64 bits a token and expert for a moment.
    assert walked.end.total_bytes == pytest.approx(kept, rel=2e-4)
    assert walked.peak.total_bytes == pytest.approx(highest, rel=1e-3)


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
