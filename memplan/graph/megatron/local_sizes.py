"""Which models Megatron-core has modules for, and a rank's own sizes of their parts."""

from memplan.errors import SetupError
from memplan.graph.core.options import TapeOptions
from memplan.graph.splitting.local_model import divided
from memplan.model.attention import AttentionSpec, OutputGate
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task
from memplan.training.splitting.context_parallel import ContextParallelKind
from memplan.training.splitting.megatron import MegatronLayers, TransformerImpl
from memplan.units import round_up

NORMS = frozenset(
    {
        NormKind.LAYER,
        NormKind.LAYER_ONE_PLUS,
        NormKind.RMS,
        NormKind.RMS_GEMMA,
        NormKind.RMS_UPCAST,
        NormKind.RMS_T5,
    }
)
"""Those that LayerNorm or RMSNorm of apex and TransformerEngine compute."""
UNGATED = frozenset(
    {Activation.GELU, Activation.GELU_NEW, Activation.GELU_TANH, Activation.GELU_FAST, Activation.GELU_PYTHON,
     Activation.RELU_SQUARED}
)  # fmt: skip
"""GELUs all run as Megatron's: one kernel with its bias, of the tanh form."""


def padded_vocabulary(model: ModelSpec, settings: MegatronLayers, degree: int) -> int:
    """Rows of the token table (``_vocab_size_with_padding``).

    Equation: the vocabulary rounded up to ``make_vocab_size_divisible_by`` times the degree.
    """
    return round_up(model.num_outputs, settings.make_vocab_size_divisible_by * degree)


def check_model(model: ModelSpec, options: TapeOptions, *, degree: int, sequence: bool) -> None:
    """Refuse a model that Megatron has no modules for.

    Raises ``SetupError``.
    """
    if len(model.stacks) != 1 or model.task is not Task.CAUSAL_LM:
        _refuse(model, f"only decoders with a language model's head are, not {model.task.value}")
    stack = model.stacks[0]
    spec = stack.embedding
    if model.has_towers or spec is None or stack.final_norm is None:
        _refuse(model, "it has other parts than an embedding, layers, a norm and a head")
    if sequence:
        divided(
            options.seq_len, degree, "seq_len, of which sequence_parallel gives each rank a share,"
        )
    shared = options.context_parallel
    for run in stack.runs:
        if shared is not None:
            _check_shared(options, run.layer.attention)
        exchanges = shared is not None and shared.kind is ContextParallelKind.ALL_TO_ALL
        if shared is not None and exchanges and isinstance(run.layer.attention, AttentionSpec):
            groups = run.layer.attention.num_kv_heads // degree
            what = f"{model.name}'s key/value heads of a tensor-parallel rank, of which context_parallel gives each a share,"
            divided(groups, shared.degree, what)
        _check_layer(model, run.layer, options)
        _check_norm(model, run.layer.norm)


def _check_layer(model: ModelSpec, layer: LayerSpec, options: TapeOptions) -> None:
    if layer.placement is not NormPlacement.PRE or layer.cross_attention is not None:
        _refuse(model, "its layers are not a norm before attention and one before a network")
    _check_attention(model, layer.attention, options)
    _check_network(model, layer.feed_forward, options)


def _check_attention(model: ModelSpec, spec: object, options: TapeOptions) -> None:
    if isinstance(spec, LatentAttentionSpec):
        _check_engine(options, "latent attention")
        if spec.bias or spec.indexer is not None or options.context_parallel is not None:
            _refuse(model, "its latent attention has biases, chooses tokens or shares sequences")
        return
    if not isinstance(spec, AttentionSpec):
        _refuse(model, "its tokens are not mixed by multi-head or grouped-query attention")
    assert isinstance(spec, AttentionSpec)
    norm = spec.query_key_norm
    odd = (
        spec.value_head_dim not in (None, spec.head_dim), spec.sinks, spec.softcap,
        spec.output_gate is not OutputGate.NONE,
        norm is not None and not spec.query_key_norm_per_head,
    )  # fmt: skip
    if any(odd):
        _refuse(model, "its attention has more than heads, positions and a norm of each head")


def _check_network(model: ModelSpec, spec: object, options: TapeOptions) -> None:
    if isinstance(spec, MixtureSpec):
        _check_engine(options, "a mixture of experts")
        group = options.tensor_parallel
        if group is not None and not group.sequence:
            msg = (
                f"sequence_parallel: Megatron wants it beside tensor_parallel where layers are mixtures, as "
                f"{model.name}'s are: give it too"
            )
            raise SetupError(msg)
        divided(spec.num_experts, options.expert_ranks, f"{model.name}'s number of experts")
        plain = spec.expert.gated and spec.expert.activation is Activation.SILU
        if not plain or spec.expert.bias:
            _refuse(model, "its experts are more than gated networks of silu")
        return
    if not isinstance(spec, FeedForwardSpec):
        _refuse(model, "its feed-forward networks are no dense ones")
    assert isinstance(spec, FeedForwardSpec)
    known = spec.activation is Activation.SILU if spec.gated else spec.activation in UNGATED
    if not known:
        words = (
            "gated networks are of silu"
            if spec.gated
            else "plain networks are of gelu or squared relu"
        )
        _refuse(model, f"its networks are of {spec.activation.value}, and modelled {words}")


def _check_engine(options: TapeOptions, what: str) -> None:
    settings = options.megatron
    assert settings is not None
    impl = settings.transformer_impl
    if impl is not TransformerImpl.TRANSFORMER_ENGINE:
        msg = (
            f"engine_options: transformer_impl: {what} is modelled with transformer_engine alone, not "
            f"{impl.value}"
        )
        raise SetupError(msg)


def _check_shared(options: TapeOptions, spec: object) -> None:
    """TransformerEngine's attention takes shared sequences, and Kwai's where each query has its key."""
    settings, shared = options.megatron, options.context_parallel
    assert settings is not None
    assert shared is not None
    if settings.transformer_impl is not TransformerImpl.KWAI:
        _check_engine(options, "context_parallel")
        return
    grouped = isinstance(spec, AttentionSpec) and spec.num_heads != spec.num_kv_heads
    if grouped or shared.kind is not ContextParallelKind.RING:
        msg = (
            "engine_options: transformer_impl: kwai's context_parallel is modelled with as many keys as "
            "queries, and as context_parallel_kind=ring; elsewhere say transformer_impl=transformer_engine"
        )
        raise SetupError(msg)


def _check_norm(model: ModelSpec, spec: NormSpec) -> None:
    if spec.kind not in NORMS or not spec.weight:
        _refuse(model, f"its norms are {spec.kind.value}, not layer or RMS norms with a weight")


def _refuse(model: ModelSpec, why: str) -> None:
    msg = (
        f"engine: megatron is not modelled for {model.name} ({model.family}): {why}; the nearest that is: "
        "`engine='deepspeed'` with `zero_stage=1`, which shards as its distributed optimizer does"
    )
    raise SetupError(msg)
