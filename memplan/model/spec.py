"""A model's shape, as data: what its operations are made from.

A ``ModelSpec`` is put together from parts that families share: how its tokens are embedded, one or
two stacks of layers, each layer's attention and feed-forward network, the norms around them, and
the head that the task needs. A family's reader (``memplan.graph.families``) fills the parts in from
a config; the blocks of ``memplan.graph`` write the operations.

Names are those of Hugging Face's configs: ``hidden_size``, ``num_heads``
(``num_attention_heads``), ``num_kv_heads`` (``num_key_value_heads``), ``intermediate_size``.
"""

from dataclasses import dataclass
from enum import Enum

from memplan.dtypes import DType


class Task(Enum):
    """What the model is trained for: which class of transformers is meant."""

    BASE = "base"
    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"


class NormKind(Enum):
    """How a normalization is computed, operation by operation."""

    LAYER = "layer_norm"
    """``torch.nn.LayerNorm``: one fused kernel."""
    RMS = "rms_norm"
    """Llama's: an fp32 copy, normalized, cast back, then times the weight."""
    RMS_T5 = "rms_norm_t5"
    """T5's: only the variance is computed on an fp32 copy."""
    RMS_GEMMA = "rms_norm_gemma"
    """Gemma's: everything in fp32, times ``1 + weight``, then cast back."""
    RMS_UPCAST = "rms_norm_upcast"
    """OLMo 2's: everything in fp32, the weight's product too, then cast back."""
    LAYER_PLAIN = "layer_norm_plain"
    """OLMo's: an fp32 layer norm that owns no parameters."""
    LAYER_UPCAST = "layer_norm_upcast"
    """Cohere's: a layer norm written out in fp32, with a weight only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """A normalization layer."""

    kind: NormKind
    bias: bool = False
    """Whether it owns a bias beside its weight."""


class Projection(Enum):
    """How queries, keys and values come out of the hidden states."""

    SEPARATE = "separate"
    """Three linear layers."""
    FUSED_SPLIT = "fused_split"
    """One linear layer whose output is split into q, k and v, each contiguous in the columns."""
    FUSED_INTERLEAVED = "fused_interleaved"
    """One linear layer whose output is viewed per head, then split (GPT-NeoX, BLOOM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotarySpec:
    """Rotary position embeddings."""

    dim: int
    """Dimensions of each head that are rotated; the rest pass through."""
    interleaved: bool = False
    """Neighbouring pairs are rotated (GPT-J, Cohere) rather than the two halves."""
    upcast: bool = False
    """Queries and keys are rotated in fp32 and cast back (ESM)."""


class AttentionForm(Enum):
    """Who computes the scores: transformers' shared functions, or the class in steps of its own."""

    INTERFACE = "interface"
    """``ALL_ATTENTION_FUNCTIONS``: eager, sdpa or flash, as asked for."""
    FP32_SCORES = "fp32_scores"
    """Queries and keys in fp32, the scores divided, then masked (GPT-J)."""
    FP32_SCORES_MASKED = "fp32_scores_masked"
    """Queries and keys in fp32, the scores masked by a buffer, then by the mask (GPT-Neo)."""
    FP32_SCORES_DIVIDED = "fp32_scores_divided"
    """Queries and keys in fp32, the scores masked, then divided (CodeGen)."""
    MASK_PRODUCT = "mask_product"
    """The scores times a 0/1 buffer, plus its complement (GPT)."""
    ALIBI_PRODUCT = "alibi_product"
    """``alibi.baddbmm``: the bias is added by the matrix product itself (BLOOM)."""
    ALIBI_SUM = "alibi_sum"
    """The bias is added to the scores, then ``masked_fill`` (MPT)."""
    CLAMPED_SCORES = "clamped_scores"
    """The masked scores are clamped from below by ``torch.max`` (XGLM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Multi-head or grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head; ``num_heads * head_dim`` need not equal the hidden size."""
    projection: Projection = Projection.SEPARATE
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    rotary: RotarySpec | None = None
    query_key_norm: NormSpec | None = None
    """A norm on queries and keys (Qwen3, OLMo 2)."""
    query_key_norm_per_head: bool = True
    """The norm runs over each head's dimensions rather than over all of them at once."""
    form: AttentionForm = AttentionForm.INTERFACE
    query_rescaled: bool = False
    """The queries are multiplied by the scale, and the scores by one (OPT)."""
    causal: bool = True
    sliding_window: int | None = None
    alibi: bool = False
    softcap: bool = False
    """Scores pass through a tanh (Gemma 2): only eager attention can do that."""
    relative_bias_buckets: int = 0
    """Buckets of T5's learned relative position bias; 0 for none."""
    dropout: float = 0.0
    """Probability on the attention weights."""
    fp32_softmax: bool = True
    """Eager attention computes the softmax in fp32 and casts back; BERT does not."""
    scaled_query: bool = False
    """The queries are scaled before they are rotated, not the scores (ESM)."""
    additive_mask: bool = False
    """The class makes a mask even where nothing is masked (LayoutLM)."""


class Activation(Enum):
    """A feed-forward network's nonlinearity, by Hugging Face's names."""

    RELU = "relu"
    RELU_SQUARED = "relu2"
    GELU = "gelu"
    GELU_NEW = "gelu_new"
    """The tanh form written out in Python: several elementwise operations."""
    GELU_TANH = "gelu_pytorch_tanh"
    """The tanh form as one kernel."""
    GELU_FAST = "gelu_fast"
    QUICK_GELU = "quick_gelu"
    SILU = "silu"
    TANH = "tanh"
    BLOOM_GELU = "bloom_gelu"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec:
    """A dense feed-forward network."""

    intermediate_size: int
    activation: Activation
    gated: bool = False
    """``act(gate(x)) * up(x)`` rather than ``act(up(x))``."""
    fused_gate_up: bool = False
    """Gate and up are one linear layer whose output is split in two (Phi-3)."""
    bias: bool = False
    activation_dropout: float = 0.0
    """Probability on the activations, before the last linear layer."""


class RouterScore(Enum):
    """How a router's logits become weights of experts."""

    SOFTMAX = "softmax"
    """Over all experts, of which the likeliest are taken (Mixtral)."""
    SOFTMAX_SELECTED = "softmax_selected"
    """The largest logits are taken first, then the softmax over those (Granite, gpt-oss)."""
    SIGMOID = "sigmoid"
    """Each expert scored on its own (DeepSeek-V3)."""
    SPARSE_MIXER = "sparse_mixer"
    """Phi-3.5-MoE's two draws, each with a gradient estimate of its own."""


class Normalization(Enum):
    """How the weights of a token's experts are made to sum to one."""

    NONE = "none"
    IN_PLACE = "in_place"
    """Divided in place: autograd keeps a copy of the undivided ones."""
    COPY = "copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """What sends each token to its experts."""

    score: RouterScore = RouterScore.SOFTMAX
    bias: bool = False
    fp32_product: bool = False
    """Hidden states and weight are cast to fp32 before the product (DeepSeek)."""
    fp32_weight: bool = False
    """The weight is held in fp32 whatever the model's dtype (ERNIE 4.5)."""
    fp32_logits: bool = True
    """The logits are cast to fp32 before they are scored."""
    correction: bool = False
    """A bias is added to the scores, for choosing only; it is a buffer."""
    correction_parameter: bool = False
    """That bias is a parameter that is not trained, so it is counted."""
    grouped: bool = False
    """Whole groups of experts are ruled out first (DeepSeek)."""
    normalization: Normalization = Normalization.NONE
    scaled: bool = False
    """The weights are multiplied by a constant."""
    cast_weights: bool = False
    """The weights are cast back to the hidden states' dtype."""
    jitter: int = 0
    """How many times the hidden states are multiplied by noise, in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSpec:
    """A mixture-of-experts feed-forward network."""

    num_experts: int
    num_experts_per_token: int
    expert: FeedForwardSpec
    """The shape of one routed expert."""
    router: RouterSpec = RouterSpec()
    clamped_gate: bool = False
    """gpt-oss's gate: both halves clamped, a scaled sigmoid, one added to the other half."""
    shared: FeedForwardSpec | None = None
    """An expert that every token passes."""
    shared_first: bool = False
    """It runs before the routed experts rather than after them."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a learned gate (Qwen2-MoE)."""
    routed_scaled: bool = False
    """The routed experts' sum is multiplied by a constant (Laguna)."""
    fp32_sum: bool = False
    """Routed and shared outputs are added in fp32 (Hunyuan V3)."""


class NormPlacement(Enum):
    """Where a layer's norms stand."""

    PRE = "pre"
    """Before attention and before the feed-forward network (GPT-2, Llama)."""
    POST = "post"
    """After each residual sum (BERT)."""
    SANDWICH = "sandwich"
    """Before and after both (Gemma 2)."""
    OUTPUT = "output"
    """Only on the outputs, before the residual sum (OLMo 2)."""
    PARALLEL = "parallel"
    """Attention and feed-forward read the same input, each through its own norm (GPT-NeoX)."""
    PARALLEL_SHARED = "parallel_shared"
    """Attention and feed-forward read one normalized input (Phi, Cohere)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer of a stack."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | MixtureSpec
    norm: NormSpec
    placement: NormPlacement = NormPlacement.PRE
    cross_attention: AttentionSpec | None = None
    dropout: float = 0.0
    """Probability on the outputs of attention and of the feed-forward network."""
    residual_scaled: bool = False
    """What is added to the residual stream is multiplied by a constant (Granite, MiniCPM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """A number of equal layers that follow one another."""

    count: int
    layer: LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """How token ids become hidden states."""

    embedding_size: int
    """Width of the token table; differs from the hidden size where a projection follows."""
    num_positions: int = 0
    """Rows of a learned position table, offset included; 0 for none."""
    positions_from_ids: bool = False
    """Each sequence's positions are counted past its padding tokens (RoBERTa)."""
    num_token_types: int = 0
    token_type_buffer: bool = False
    """Token types are gathered from a buffer of zeros (BERT), not made for the batch."""
    num_box_positions: int = 0
    """Rows of each of the four tables of bounding-box coordinates (LayoutLM)."""
    token_dropout: bool = False
    """Masked tokens' embeddings are zeroed and the others scaled up for it (ESM)."""
    own_module: bool = False
    """A module of its own makes the sum, so that only its result outlives it (BERT)."""
    projection_bias: bool = True
    """The projection to the hidden size, where there is one, has a bias."""
    norm: NormSpec | None = None
    dropout: float = 0.0
    scaled: bool = False
    """The embeddings are multiplied by a constant (Gemma)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """An encoder or a decoder."""

    name: str
    """``decoder`` or ``encoder``."""
    runs: tuple[LayerRun, ...]
    embedding: EmbeddingSpec | None
    """None where the stack shares the other one's embedding entirely (T5's decoder)."""
    final_norm: NormSpec | None
    final_dropout: float = 0.0
    mixed_masks: bool = False
    """The class makes the full causal mask even where every layer has a window (Qwen2, Gemma 2)."""

    @property
    def num_layers(self) -> int:
        """Layers in all runs."""
        return sum(run.count for run in self.runs)


class Pooling(Enum):
    """What a sequence classifier makes of the hidden states of all tokens."""

    FIRST = "first"
    """The first token's."""
    POOLER = "pooler"
    """What the base model's pooler made of the first token's."""
    MEAN = "mean"
    """Their mean."""
    MEAN_LOGITS = "mean_logits"
    """Every token is classified, and the logits averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierSpec:
    """A classification head: a dense layer or none, then a linear layer to the classes."""

    pooling: Pooling = Pooling.FIRST
    """Of a sequence classifier; the others look at every token."""
    dense: Activation | None = None
    """The activation behind a dense layer of the hidden size; None for no such layer."""
    first_dropout: float = 0.0
    """Probability before the dense layer."""
    dropout: float = 0.0
    """Probability before the last linear layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """What the task adds on top of the base model."""

    tied: bool = False
    """The output matrix is the token table."""
    bias: bool = False
    transform: FeedForwardSpec | None = None
    """A dense layer and an activation before the output matrix (BERT's masked-LM head)."""
    transform_norm: NormSpec | None = None
    softcap: bool = False
    scaled: bool = False
    """The hidden states are scaled before, or the logits after, the output matrix."""
    loss_upcast: bool = False
    """The masked-LM loss casts the logits to fp32 first."""
    bias_added: bool = False
    """The output matrix's bias is a separate sum, owned by the head (ESM)."""
    spare_bias: bool = False
    """An untied output matrix leaves the head's own bias unused (BERT)."""
    pooler: bool = False
    """A dense layer on the first token, part of the base model (BERT)."""
    pooler_tasks: tuple[Task, ...] = ()
    """The other tasks whose class keeps the pooler."""
    contact_features: int = 0
    """Inputs of a regression on attention maps that no loss reaches (ESM)."""
    classifier: ClassifierSpec | None = None


class Tying(Enum):
    """Whether the file and transformers agree on sharing input and output matrices."""

    CLEAR = "clear"
    AMBIGUOUS = "ambiguous"
    """transformers ties what the published checkpoint holds twice (flan-T5, mT5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model, complete: everything that decides its operations and parameters."""

    name: str
    family: str
    """transformers' ``model_type``."""
    task: Task
    vocab_size: int
    hidden_size: int
    context_length: int
    """Positions the model was made for, without offsets [tokens]."""
    stacks: tuple[StackSpec, ...]
    """One stack, or the encoder and then the decoder."""
    head: HeadSpec
    num_labels: int = 2
    """Classes of a classification head."""
    tying: Tying = Tying.CLEAR
    checkpoint_dtype: DType = DType.FP32
    """What the config says the published weights are held in."""
    eager_attention_only: bool = False
    """The class has no other attention than the one written out in Python."""
    source: str = ""
    """Where the shape was read: a file, a hub id or ``built-in``."""

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return sum(stack.num_layers for stack in self.stacks)
