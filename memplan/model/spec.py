"""A model's shape, as data: what its operations are made from.

A ``ModelSpec`` is put together from parts that families share: how its tokens are embedded, one or
two stacks of layers, each layer's attention and feed-forward network, the norms around them, and
the head that the task needs. A family's reader (``memplan.graph.families``) fills the parts in from
a config; the blocks of ``memplan.graph`` write the operations.

Names are those of Hugging Face's configs: ``hidden_size``, ``num_heads``
(``num_attention_heads``), ``num_kv_heads`` (``num_key_value_heads``), ``intermediate_size``.
"""

from enum import Enum

from memplan.dtypes import DType
from memplan.model.parameters import ParameterBlock, ParameterShape
from memplan.records import dataclass


class Task(Enum):
    """What the model is trained for: which class of transformers is meant."""

    BASE = "base"
    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    MASKED_LM = "masked-lm"
    PRETRAINING = "pretraining"
    """The class's own objective where it is none of the others: ELECTRA's replaced tokens."""
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"
    """One logit for each choice, which is a sequence of the batch."""
    OTHER = "other"
    """What the class that ``architectures`` names is for, where it is none of these."""


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
    LAYER_ONE_PLUS = "layer_norm_one_plus"
    """Nemotron's: a layer norm with one plus its weight, in autocast's dtype."""
    LAYER_UPCAST = "layer_norm_upcast"
    """Cohere's: a layer norm written out in fp32, with a weight only."""
    LAYER_DIVIDED = "layer_norm_divided"
    """DeBERTa's: written out in fp32, divided by the root; weight and bias in the input's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """A normalization layer."""

    kind: NormKind
    bias: bool = False
    """Whether it owns a bias beside its weight."""
    weight: bool = True
    """Whether it owns a weight (OPT can leave both out)."""


class Projection(Enum):
    """How queries, keys and values come out of the hidden states."""

    SEPARATE = "separate"
    """Three linear layers."""
    FUSED_SPLIT = "fused_split"
    """One linear layer whose output is split into q, k and v, each contiguous in the columns."""
    FUSED_SLICED = "fused_sliced"
    """One linear layer, out of which q, k and v are sliced one by one (Phi-3)."""
    FUSED_INTERLEAVED = "fused_interleaved"
    """One linear layer whose output is viewed per head, then split (GPT-NeoX)."""
    FUSED_SELECTED = "fused_selected"
    """One linear layer whose output is viewed per head, each third indexed out (BLOOM)."""
    FUSED_COPIED = "fused_copied"
    """One linear layer whose output is split in blocks of heads, which are copied (CodeGen)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotarySpec:
    """Rotary position embeddings."""

    dim: int
    """Dimensions of each head that are rotated; the rest pass through."""
    upcast: bool = False
    """Queries and keys are rotated in fp32 and cast back (ESM, Cohere)."""
    upcast_twice: bool = False
    """The same, with a copy in fp32 for each of the two products (ModernBERT)."""
    full_tables: bool = False
    """The tables stay in fp32, and what they rotated is cast back (OLMo)."""
    expanded_tables: bool = False
    """Every layer repeats each number of the tables for itself (GLM, Helium)."""
    paired: bool = False
    """Neighbouring numbers are turned by half of the tables' columns (DeepSeek-V3)."""
    halved: bool = False
    """Heads are split in halves, turned by tables of half a head (gpt-oss)."""
    sections: bool = False
    """The tables are of time, height and width, for each sequence of its own (Qwen3.5)."""
    complex_numbers: bool = False
    """Pairs are multiplied as complex numbers in fp32 (DeepSeek-V2)."""
    joined: bool = False
    """Heads are joined from a rotated part and the rest even where nothing rests (Phi-3)."""
    names_parts: bool = False
    """The attention module's own variables hold both parts until it returns (Phi)."""


class PositionBias(Enum):
    """What is added to the scores for the distance between two positions (T5)."""

    NONE = "none"
    LEARNED = "learned"
    """Looked up in a table of the layer's own (UMT5)."""
    FIRST_LEARNED = "first_learned"
    """The same, for the layers that follow too (T5)."""
    EARLIER_LEARNED = "earlier_learned"
    """What the stack's first layer looked up."""
    ZEROS = "zeros"
    """Zeros that the layer makes (UMT5's cross attention)."""
    FIRST_ZEROS = "first_zeros"
    """The same for the layers that follow too; under checkpointing they need a gradient (T5)."""
    STACK = "stack"
    """Looked up once before the layers, and copied for every sequence (MPNet)."""
    EARLIER_ZEROS = "earlier_zeros"
    """What the stack's first layer made."""


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
    DIRECT = "direct"
    """``scaled_dot_product_attention`` called by the class, always with a mask (Falcon)."""
    DIRECT_ALIBI = "direct_alibi"
    """The same, with each head's bias in the mask (Falcon-RW)."""
    PLAIN_SCORES = "plain_scores"
    """Divided, then masked; the softmax in their own dtype (RemBERT, MPNet)."""
    SEGMENTS = "segments"
    """A bias of segments is added, and masks applied before and after the softmax (CPM-Ant)."""
    CLAMPED_SCORES = "clamped_scores"
    """The masked scores are clamped from below by ``torch.max`` (XGLM)."""


class OutputGate(Enum):
    """What attention's output is multiplied by, before the output projection."""

    NONE = "none"
    SIGMOID = "sigmoid"
    """Of a linear layer that runs with the queries' (AFMoE)."""
    SOFTPLUS = "softplus"
    """In fp32, of a linear layer that runs after attention (Laguna)."""
    SOFTPLUS_PER_HEAD = "softplus_per_head"
    """One number for each head (Laguna)."""
    QUERIES = "queries"
    """Sigmoid, of the other half of what the queries' projection gives (Qwen3-Next)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceSpec:
    """What contents are compared with beside each other: how far apart they stand (DeBERTa)."""

    max_distance: int
    """Distances either way that have a row in the table; 0 for no table [tokens]."""
    content_to_position: bool = False
    position_to_content: bool = False
    dropout: float = 0.0
    """Probability on the table."""
    norm: NormSpec | None = None
    """A norm that the table passes once for all layers (DeBERTa-v3)."""
    flat_heads: bool = False
    """Heads and batch are one dimension, and the scores scaled one by one (DeBERTa-v2)."""
    shared_projections: bool = False
    """Distances pass the projections of queries and keys (DeBERTa-v3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Multi-head or grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head; ``num_heads * head_dim`` need not equal the hidden size."""
    value_head_dim: int | None = None
    """Size of a value's head, where it differs from the queries' and keys'."""
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
    query_key_norm_weight_per_head: bool = False
    """Each head has a norm weight of its own (Cohere)."""
    query_key_norm_last: bool = False
    """The norm comes after the rotary embedding (Hunyuan)."""
    query_scaled_by_position: bool = False
    """Rotated queries are multiplied by a factor of their position (Ministral 3)."""
    fills_cache: bool = False
    """A key/value cache is filled in training too, unless layers are checkpointed (Fuyu)."""
    projection_clamped: bool = False
    """Queries, keys and values are clamped in place (OLMo's ``clip_qkv``)."""
    output_gate: OutputGate = OutputGate.NONE
    value_scaled: bool = False
    """Values are multiplied by a constant (MiMo-V2)."""
    own_eager: bool = False
    """The class's eager attention subtracts the largest score first (gpt-oss, MiMo-V2)."""
    sinks: bool = False
    """A learned score of each head joins the softmax as one more key; with ``own_eager``."""
    form: AttentionForm = AttentionForm.INTERFACE
    query_rescaled: bool = False
    """The queries are multiplied by the scale, and the scores by one (OPT)."""
    weights_like_values: bool = False
    """Without an fp32 softmax, its result is still cast to the values' dtype (GPT-2)."""
    upcast_reordered: bool = False
    """Eager attention multiplies fp32 copies outside autocast (an option of GPT-2)."""
    paired_rotary_dim: int = 0
    """Neighbouring pairs of a head's first dimensions are rotated (GPT-J); 0 for none."""
    buffer_positions: int = 0
    """Rows of the causal mask or of the rotary table that each module owns as a buffer."""
    causal: bool = True
    sliding_window: int | None = None
    softcap: bool = False
    """Scores pass through a tanh (Gemma 2): only eager attention can do that."""
    position_bias: PositionBias = PositionBias.NONE
    relative_bias_buckets: int = 0
    """Rows of the table of a learned position bias (T5)."""
    dropout: float = 0.0
    """Probability on the attention weights."""
    fp32_softmax: bool = True
    """Eager attention computes the softmax in fp32 and casts back; BERT does not."""
    names_weights: bool = True
    """The layer has a name for eager attention's weights, so that they live until it ends."""
    distances: DistanceSpec | None = None
    """Scores of relative distances are added (DeBERTa)."""
    padding_mask: bool = False
    """The class adds a mask of padding to the scores even where there is none (LayoutLM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSpec:
    """DeepSeek-V3.2's choice of the tokens that each token attends to."""

    num_heads: int
    head_dim: int
    rotary_dim: int
    top_k: int
    """Tokens that are chosen at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """DeepSeek's multi-head latent attention: keys and values come out of a narrow vector."""

    num_heads: int
    query_rank: int | None
    """Width between the two layers that make the queries; None where one layer makes them."""
    key_value_rank: int
    plain_head_dim: int
    """What is not rotated of a query's or key's head."""
    value_head_dim: int
    rotary: RotarySpec
    """Its ``dim`` is the rest of the head; the keys share it."""
    norm: NormSpec
    """On the two narrow vectors."""
    bias: bool = False
    """The layers into the narrow vectors and out of the values have a bias."""
    dropout: float = 0.0
    indexer: IndexerSpec | None = None
    """Only some earlier tokens are attended to (DeepSeek-V3.2)."""

    @property
    def scores(self) -> AttentionSpec:
        """The attention that runs on the widened heads."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.plain_head_dim + self.rotary.dim,
            value_head_dim=self.value_head_dim,
            rotary=self.rotary,
            dropout=self.dropout,
        )


class Activation(Enum):
    """A feed-forward network's nonlinearity, by Hugging Face's names."""

    RELU = "relu"
    RELU_SQUARED = "relu2"
    GELU = "gelu"
    GELU_PYTHON = "gelu_python"
    """The exact form written out in Python with the error function (ESM)."""
    GELU_NEW = "gelu_new"
    """The tanh form written out in Python: several elementwise operations."""
    GELU_TANH = "gelu_pytorch_tanh"
    """The tanh form as one kernel."""
    GELU_FAST = "gelu_fast"
    QUICK_GELU = "quick_gelu"
    SILU = "silu"
    TANH = "tanh"
    BLOOM_GELU = "bloom_gelu"
    XIELU = "xielu"
    """Two parabolas and an exponential, with two trained numbers (Apertus)."""


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
    inline: bool = False
    """Run in the layer's own ``forward``, where its result takes its input's name (OPT)."""
    output_cast: bool = False
    """The activations are cast to the last weight's dtype, against autocast (T5)."""


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
    returns_fp32_logits: bool = False
    """It is those that the class keeps, and returns for the router loss."""
    softcap: bool = False
    """The logits pass through a tanh."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedSpec:
    """A part of a layer whose weights are known, but whose operations are not written down."""

    parameters: tuple[ParameterShape, ...] = ()
    """None at all where the layer has no such part."""


NOTHING = CountedSpec()
"""A part that the layer does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolutionSpec:
    """LFM2's mixer: products around a short convolution over the tokens."""

    kernel_size: int
    bias: bool = False
    """The convolution and both linear layers have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningSpec:
    """MiniMax's linear attention: blocks of tokens, each with a share of all earlier ones."""

    num_heads: int
    head_dim: int
    block_size: int
    """Tokens of a block, which attend to each other as usual."""
    activation: Activation
    """Of queries, keys and values."""
    norm: NormSpec
    """On the output, before its gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRuleSpec:
    """Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads."""
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Of the convolution that queries, keys and values pass."""
    activation: Activation
    """Behind that convolution."""
    fused: bool
    """Two linear layers make everything, rather than four (Qwen3-Next)."""


OtherMixer = ShortConvolutionSpec | LightningSpec | DeltaRuleSpec | CountedSpec
"""What mixes tokens without attention's scores."""

TokenMixer = AttentionSpec | LatentAttentionSpec | OtherMixer
"""What can mix the tokens of a layer."""


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
    SINGLE = "single"
    """Before the layer's only part, attention or feed-forward (Mamba, Nemotron-H)."""
    NONE = "none"
    """The parts count norms of their own."""


class HalfClamp(Enum):
    """Where a layer clamps hidden states that are held in fp16, lest they be infinite."""

    NEVER = "never"
    SUBLAYERS = "sublayers"
    """After each residual sum (T5)."""
    LAYER = "layer"
    """After the layer's last one (mBART's encoder)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer of a stack."""

    attention: TokenMixer
    """What mixes the tokens."""
    feed_forward: FeedForwardSpec | MixtureSpec | CountedSpec
    norm: NormSpec
    placement: NormPlacement = NormPlacement.PRE
    cross_attention: AttentionSpec | None = None
    dropout: float = 0.0
    """Probability on the outputs of attention and of the feed-forward network."""
    attention_dropout_only: bool = False
    """The feed-forward network's output is left out (ALBERT, XLM-RoBERTa-XL)."""
    feed_forward_dropout_only: bool = False
    """The attention's output is left out (DistilBERT)."""

    @property
    def attention_output_dropout(self) -> float:
        """Probability on the output of attention."""
        return 0.0 if self.feed_forward_dropout_only else self.dropout

    @property
    def feed_forward_output_dropout(self) -> float:
        """Probability on the output of the feed-forward network."""
        return 0.0 if self.attention_dropout_only else self.dropout
    half_clamp: HalfClamp = HalfClamp.NEVER
    unnamed_norms: bool = False
    """The norms' results go straight into attention and feed-forward (ModernBERT)."""
    attention_norm: bool = True
    """There is a norm before attention; ModernBERT's first layer has none."""
    own_modules: bool = False
    """Each sublayer is a module that sums by itself, so its names live until then (T5)."""
    residual_scaled: bool = False
    """What is added to the residual stream is multiplied by a constant (Granite, MiniCPM)."""
    residual_weighted: bool = False
    """So is the stream itself, by another one (MiniMax)."""
    names_normed: bool = False
    """A variable of the layer holds the first norm's output until the layer ends (StableLM)."""
    dropout_inside: bool = False
    """Dropout belongs to each sublayer's own module, which holds its input until then (GPT-2)."""
    residual_first: bool = False
    """Side by side, attention's output is the first to be added to the residual (StableLM)."""
    residual_normed: bool = False
    """The residual is the norm's output, not its input (an option of BLOOM)."""
    names_attended: bool = False
    """A variable of the layer holds what attention returned until the layer ends (GPT-2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """A number of equal layers that follow one another."""

    count: int
    layer: LayerSpec
    shared: bool = False
    """All of them are one layer's parameters (ALBERT)."""


class PositionSource(Enum):
    """Where the positions that an older decoder adds to its tokens come from."""

    NONE = "none"
    COUNTED = "counted"
    """``arange``, one row for all sequences (GPT-2)."""
    MASK_SUM = "mask_sum"
    """The running sum of an attention mask, for every sequence (OPT)."""
    BUFFER = "buffer"
    """A buffer of ids; a sum with zero token types follows (GPT)."""
    SINUSOIDS = "sinusoids"
    """Rows of a fixed table that is not trained (XGLM)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSpec:
    """CPM-Ant's prompts, and the bias of segments and positions that comes with them."""

    num_types: int
    length: int
    """Tokens of a prompt; those of all kinds are rows of the token table."""
    num_segments: int
    num_buckets: int
    """Rows of the bias for distances; pairs of segments have more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """How token ids become hidden states."""

    embedding_size: int
    """Width of the token table; differs from the hidden size where a projection follows."""
    num_positions: int = 0
    """Rows of a learned position table, offset included; 0 for none."""
    position_source: PositionSource | None = None
    """Set for older decoders, which embed in the model's own ``forward``."""
    mask_buffer: bool = False
    """The model owns a boolean matrix over all positions (GPT-BigCode)."""
    scaled_in_table: bool = False
    """The token table multiplies what it looks up by a constant (XGLM)."""
    positions_from_ids: bool = False
    """Each sequence's positions are counted past its padding tokens (RoBERTa)."""
    batched_positions: bool = False
    """The positions are looked up for every sequence of the batch (BART's encoder)."""
    fixed_positions: bool = False
    """The position table holds sinusoids and is not trained (Pegasus)."""
    position_buffer: bool = False
    """The position table is a buffer, no parameter (M2M-100)."""
    extra_rows: int = 0
    """Rows of the token table beside the vocabulary's (mllama's images)."""
    prompts: PromptSpec | None = None
    """Trained prompts stand before the tokens (CPM-Ant)."""
    own_table: bool = False
    """The stack has a token table of its own; the one that both would share is unused (BART)."""
    num_token_types: int = 0
    token_type_buffer: bool = False
    """Token types are gathered from a buffer of zeros (BERT), not made for the batch."""
    num_box_positions: int = 0
    """Rows of each of the four tables of bounding-box coordinates (LayoutLM)."""
    joined_tables: tuple[tuple[int, int], ...] = ()
    """Rows and widths of tables that are joined to the tokens', then projected (RoCBert)."""
    padding_product: bool = False
    """The norm's result is multiplied by the attention mask (DeBERTa)."""
    token_dropout: bool = False
    """Masked tokens' embeddings are zeroed and the others scaled up for it (ESM)."""
    own_module: bool = False
    """A module of its own makes the sum, so that only its result outlives it (BERT)."""
    projection_in_encoder: bool = False
    """A projection to the hidden size always follows, inside the encoder (ALBERT)."""
    projection_bias: bool = True
    """The projection to the hidden size, where there is one, has a bias."""
    norm: NormSpec | None = None
    dropout: float = 0.0
    scaled: bool = False
    """The embeddings are multiplied by a constant (Gemma)."""
    patch_features: int = 0
    """Inputs of a linear layer for image patches, which a batch of text leaves unused (Fuyu)."""
    unscaled_held: bool = False
    """The class keeps a name for the embeddings as they were before (AFMoE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionSpec:
    """A convolution of the embeddings, added to the first layer's output (DeBERTa-v2)."""

    kernel_size: int
    groups: int
    activation: Activation
    norm: NormSpec
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """An encoder or a decoder."""

    name: str
    """``decoder`` or ``encoder``."""
    runs: tuple[LayerRun, ...]
    embedding: EmbeddingSpec | None
    """None where the stack shares the other one's embedding entirely (T5's decoder)."""
    final_norm: NormSpec | None
    convolution: ConvolutionSpec | None = None
    """Beside the first layer, which then is a run of its own."""
    final_dropout: float = 0.0
    projected_out: bool = False
    """The result is projected back to the width of the token table (OPT-350m)."""
    mixed_masks: bool = False
    """The class makes the full causal mask even where every layer has a window (Qwen2, Gemma 2)."""
    written_mask: bool = False
    """The class writes the causal mask out even where the kernel would know it (DeepSeek-V3.2)."""
    spare_window_mask: bool = False
    """The class makes the sliding mask even where no layer has a window (Qwen2-MoE)."""
    local_rotary: bool = False
    """Layers with a window have rotary tables of their own (Gemma 3)."""

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
    LAST = "last"
    """The last end-of-sequence token's (BART, T5)."""
    MEAN_LOGITS = "mean_logits"
    """Every token is classified, and the logits averaged."""
    LAST_LOGITS = "last_logits"
    """Every token is classified without a bias, and the last one's logits taken (decoders)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierSpec:
    """A classification head: a dense layer or none, then a linear layer to the classes."""

    pooling: Pooling = Pooling.FIRST
    """Of a sequence classifier; the others look at every token."""
    dense: Activation | None = None
    """The activation behind a dense layer of the hidden size; None for no such layer."""
    dense_bias: bool = True
    norm: NormSpec | None = None
    """Behind that activation (ModernBERT)."""
    every_token: bool = False
    """The dense layer and its norm stand before the classes of tokens and spans too."""
    first_dropout: float = 0.0
    """Probability before the dense layer."""
    dropout: float = 0.0
    """Probability before the last linear layer, for sequences."""
    token_dropout: float = 0.0
    """The same, for tokens."""
    span_dropout: float = 0.0
    """The same, for spans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """What the task adds on top of the base model."""

    tied: bool = False
    """The output matrix is the token table."""
    num_rows: int = 0
    """Rows of the output matrix where they are not the token table's (GLM-Image); 0: the same."""
    bias: bool = False
    transform: FeedForwardSpec | None = None
    """A dense layer and an activation before the output matrix (BERT's masked-LM head)."""
    transform_bias: bool = True
    transform_norm: NormSpec | None = None
    softcap: bool = False
    router_loss: bool = False
    """A load-balancing loss of all routers is added (``output_router_logits``)."""
    input_scaled: bool = False
    """The hidden states are multiplied by a constant before the output matrix (MiniCPM)."""
    scaled: bool = False
    """The hidden states are scaled before, or the logits after, the output matrix."""
    plain_loss: bool = False
    """The decoder's loss takes the logits as they are, in their own dtype (CPM-Ant)."""
    logits_bias: bool = False
    """A buffer is added to the logits (BART's ``final_logits_bias``)."""
    loss_upcast: bool = False
    """The masked-LM loss casts the logits to fp32 first."""
    bias_added: bool = False
    """The output matrix's bias is a separate sum, owned by the head (ESM)."""
    spare_bias: bool = False
    """An untied output matrix leaves the head's own bias unused (BERT)."""
    pooler_tasks: tuple[Task, ...] = ()
    """Tasks whose class has a pooler: a dense layer and a tanh on the first token (BERT)."""
    discriminator: Activation | None = None
    """The activation of the head that tells replaced tokens from others (ELECTRA)."""
    contact_features: int = 0
    """Inputs of a regression on attention maps that no loss reaches (ESM)."""
    classifier: ClassifierSpec | None = None
    """None for a decoder's: one linear layer over every token."""


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
    recomputes: bool = True
    """The class can checkpoint its activations."""
    eager_attention_only: bool = False
    """The class has no other attention than the one written out in Python."""
    tables: tuple[ParameterBlock, ...] = ()
    """Parts that are counted but not written down: towers, projectors, or, without any stack, the
    whole model."""
    base_tables: tuple[ParameterBlock, ...] | None = None
    """The same parts of the model without a task's head, where its class differs in them."""
    activations_left_out: str = ""
    """What of the activations is not in the figures, in words; empty when all of them are."""
    guess: str = ""
    """What was assumed of a type that is not known; empty where nothing was."""
    source: str = ""
    """Where the shape was read: a file, a hub id or ``built-in``."""

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return sum(stack.num_layers for stack in self.stacks)

    @property
    def num_outputs(self) -> int:
        """Logits of a token."""
        return self.head.num_rows or self.vocab_size
