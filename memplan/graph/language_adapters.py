"""X-MOD's layer: BERT's, with an adapter for each language behind the feed-forward network.

transformers 5.23, models/xmod/modeling_xmod.py, ``XmodOutput.lang_adapter``. Every adapter is called with the
sequences of its language. All are taken to be of one: the others' adapters are given nothing, and their
weights gradients of zeros all the same.
"""

from memplan.dtypes import DType
from memplan.graph.layer_parts import feed_forward_of, mix_tokens
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.layers import LanguageAdaptersSpec, LayerSpec, NormPlacement


def adapted_layer(
    t: Tape, x: Tensor, layer: LayerSpec, spec: LanguageAdaptersSpec, context: StackContext
) -> Tensor:
    """Attention and a sum; feed-forward, a sum, the adapters; each part with its norm before or behind."""
    hidden, before = context.hidden_size, layer.placement is NormPlacement.PRE
    given = norm(t, x, layer.norm, "self_attn_layer_norm", hidden) if before else x
    attended = mix_tokens(t, given, layer.attention, context)
    module = "self_attn.dropout" if layer.dropout_modules else ""
    attended = dropout(t, attended, layer.attention_output_dropout, module=module)
    middle = t.add(attended, x)
    if not before:
        middle = norm(t, middle, layer.norm, "self_attn_layer_norm", hidden)
    t.touch(attended, given, *context.attention_frame)
    context.attention_frame = ()
    given = norm(t, middle, layer.norm, "final_layer_norm", hidden) if before else middle
    fed = feed_forward_of(t, given, layer, context)
    multiplied = t.segment.operations[-1].inputs[0]
    module = "mlp.dropout" if layer.dropout_modules else ""
    fed = dropout(t, fed, layer.feed_forward_output_dropout, module=module)
    out = _adapted(t, t.add(fed, middle), layer, spec, hidden)
    t.touch(multiplied)
    if not before:
        out = _last_norm(t, out, layer, hidden)
    t.linger(middle)
    return out


def _last_norm(t: Tape, x: Tensor, layer: LayerSpec, hidden: int) -> Tensor:
    """The layer's last norm, which may have been there before."""
    if all(each.name != "final_layer_norm.weight" for each in t.segment.parameters):
        return norm(t, x, layer.norm, "final_layer_norm", hidden)
    with t.declared_weights():
        return norm(t, x, layer.norm, "final_layer_norm", hidden)


def _adapted(
    t: Tape, x: Tensor, layer: LayerSpec, spec: LanguageAdaptersSpec, hidden: int
) -> Tensor:
    residual = given = x
    if spec.own_norm:
        given = norm(t, x, layer.norm, "adapter_layer_norm", hidden)
    elif spec.norm_reused:
        given = _last_norm(t, x, layer, hidden)
    if spec.norm_first:
        residual = given
    total = t.tensor(given.numel, given.dtype)
    t.record(OperationKind.ZEROS, (), (total,))
    for number in range(spec.num_languages):
        total = _one(t, given, total, spec, hidden, number)
    dropped = dropout(t, total, layer.dropout, module="adapter.dropout")
    out = t.view(dropped, dropped.numel)
    t.record(
        OperationKind.ADD_IN_PLACE, (dropped, residual), (out,),
        gradients=(Gradient.ALIAS, Gradient.ALIAS if residual.dtype is out.dtype else Gradient.FRESH),
    )  # fmt: skip
    t.touch(given, total)
    return out


def _one(
    t: Tape,
    x: Tensor,
    total: Tensor,
    spec: LanguageAdaptersSpec,
    hidden: int,
    number: int,
) -> Tensor:
    """The sequences of one language, through its adapter, and back where they belong."""
    rows = 0 if number else x.numel
    places = t.tensor(0 if number else t.options.batch_size, DType.INT64)
    t.record(OperationKind.EQ, (), (places,))
    state = t.tensor(rows, x.dtype)
    t.record(
        OperationKind.INDEX, (x, places), (state,), saves=(places,),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=x.storage.num_bytes if t.decomposed else 0,
    )  # fmt: skip
    name = f"adapters.{number}"
    down = linear(t, state, f"{name}.up_proj", hidden, spec.width, bias=True)
    middle = activation_module(t, down, spec.activation, f"{name}.act_fn")
    made = linear(t, middle, f"{name}.down_proj", spec.width, hidden, bias=True)
    out = t.view(total, total.numel)
    t.record(
        OperationKind.COPY_SLICE, (total, made), (out,),
        gradients=(Gradient.FRESH if total.requires_grad else Gradient.NONE, Gradient.FRESH),
    )  # fmt: skip
    t.touch(made)
    return out
