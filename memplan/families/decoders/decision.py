"""Decision Transformer: GPT-2's layers over returns, states and actions."""

from memplan.families.decoders.gpt import gpt2_layer
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import (
    TOKENS_PER_STEP,
    EmbeddingSpec,
    LayerRun,
    StackSpec,
    TrajectorySpec,
)
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a Decision Transformer's config."""
    hidden_size = reader.integer("hidden_size")
    key = "add_cross_attention"
    if reader.flag(key):
        problem = "true is not modelled: nothing is given to attend to; set it to false"
        raise reader.fail(key, problem)
    trajectory = TrajectorySpec(
        state=reader.integer("state_dim"),
        action=reader.integer("act_dim"),
        num_steps=reader.integer("max_ep_len"),
        squashed=reader.flag("action_tanh"),
    )
    positions = reader.integer("n_positions")
    layer = gpt2_layer(reader, hidden_size)
    stack = StackSpec(
        name="decoder",
        runs=(LayerRun(count=reader.layers("num_hidden_layers"), layer=layer),),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            num_positions=positions,
            trajectory=trajectory,
            dropout=reader.number("embd_pdrop"),
        ),
        final_norm=NormSpec(kind=NormKind.LAYER, bias=True),
    )
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, Task.BASE),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=max(positions // TOKENS_PER_STEP, 1),
        stacks=(stack,),
        head=HeadSpec(),
        checkpoint_dtype=checkpoint_dtype(reader),
        recomputes=False,
        transposed_linear=True,
        source=reader.source,
    )
