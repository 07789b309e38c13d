"""What operations there are: the kinds that a tape records.

Most are called as torch calls them; what is in place there ends in ``_`` and here in ``IN_PLACE``. What
a rule asks of an operation is a set of kinds below, or a field of ``Operation``: never its name.
"""

from enum import StrEnum


class OperationKind(StrEnum):
    """What an operation computes; the value is what people read."""

    ABS = "abs"
    ADD = "add"
    ADDCMUL = "addcmul"
    ADD_BUFFER = "add_buffer"
    ADD_IN_PLACE = "add_"
    ADD_SCALAR = "add_scalar"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    ARANGE = "arange"
    ARGUMENTS = "arguments"
    AVERAGE_POOL = "average_pool"
    BADDBMM = "baddbmm"
    BIAS_DROPOUT_ADD = "bias_dropout_add"
    BATCH_NORM = "batch_norm"
    BINARY_CROSS_ENTROPY_WITH_LOGITS = "binary_cross_entropy_with_logits"
    BITWISE_AND = "bitwise_and"
    BITWISE_OR = "bitwise_or"
    BITWISE_NOT = "bitwise_not"
    BLOOM_GELU = "bloom_gelu"
    BROADCAST = "broadcast"
    CAT = "cat"
    CEIL = "ceil"
    CHUNKED_CROSS_ENTROPY = "chunked_cross_entropy"
    CLAMP = "clamp"
    CLAMP_IN_PLACE = "clamp_"
    CLONE = "clone"
    CONTIGUOUS = "contiguous"
    CONVOLUTION = "convolution"
    COPY_IN_PLACE = "copy_"
    COPY_SLICE = "copy_slice"
    COPY_TO_RANKS = "copy_to_ranks"
    COS = "cos"
    COUNTED = "counted"
    CROSS_ENTROPY = "cross_entropy"
    CUDNN_ATTENTION = "cudnn_attention"
    CUMSUM = "cumsum"
    CUT_CROSS_ENTROPY = "cut_cross_entropy"
    DIV = "div"
    DROPOUT = "dropout"
    EFFICIENT_ATTENTION = "efficient_attention"
    EMBEDDING = "embedding"
    EMPTY = "empty"
    ENTROPY = "entropy"
    EQ = "eq"
    ERF = "erf"
    EXP = "exp"
    EXPAND = "expand"
    EXPM1 = "expm1"
    EYE = "eye"
    FFT = "fft"
    FLASH_ATTENTION = "flash_attention"
    FLIP = "flip"
    FLOOR_DIVIDE = "floor_divide"
    FUSED_GATE = "fused_gate"
    FUSED_LINEAR_CROSS_ENTROPY = "fused_linear_cross_entropy"
    FUSED_LOG_PROBABILITIES = "fused_log_probabilities"
    FUSED_SOFTMAX = "fused_softmax"
    GATHER = "gather"
    GE = "ge"
    GELU = "gelu"
    GELU_FAST = "gelu_fast"
    GELU_NEW = "gelu_new"
    GELU_PYTHON = "gelu_python"
    GELU_PYTORCH_TANH = "gelu_pytorch_tanh"
    GIVEN = "given"
    GLU = "glu"
    GROUPED_MM = "grouped_mm"
    GT = "gt"
    GUMBEL = "gumbel"
    HARDSWISH = "hardswish"
    HISTC = "histc"
    IM2COL = "im2col"
    INDEX = "index"
    INDEX_ADD_IN_PLACE = "index_add_"
    INDEX_SELECT = "index_select"
    INDICES = "indices"
    LAYER_NORM = "layer_norm"
    LE = "le"
    LINEAR = "linear"
    LOG = "log"
    LOGSUMEXP = "logsumexp"
    LOG_SIGMOID = "log_sigmoid"
    LINEAR_4BIT = "linear_4bit"
    LINEAR_8BIT = "linear_8bit"
    LINEAR_AWQ = "linear_awq"
    LOG_SOFTMAX = "log_softmax"
    LT = "lt"
    MASK = "mask"
    MASKED_FILL = "masked_fill"
    MASKED_FILL_IN_PLACE = "masked_fill_"
    MASK_TO_BIAS = "mask_to_bias"
    MATMUL = "matmul"
    MAX = "max"
    MAXIMUM = "maximum"
    MEAN = "mean"
    MINIMUM = "minimum"
    MUL = "mul"
    MSE_LOSS = "mse_loss"
    MULTIPLIER = "multiplier"
    MUL_IN_PLACE = "mul_"
    MUL_SCALAR = "mul_scalar"
    NE = "ne"
    NEG = "neg"
    NEW_EMPTY = "new_empty"
    NEW_ONES = "new_ones"
    NLL_LOSS = "nll_loss"
    NONZERO = "nonzero"
    ONES = "ones"
    OUTPUTS_TO_FP32 = "outputs_to_fp32"
    PAD = "pad"
    POLAR = "polar"
    POSITION_FACTORS = "position_factors"
    POW = "pow"
    QUICK_GELU = "quick_gelu"
    RECEIVE = "receive"
    REDUCE_SCATTER = "reduce_scatter"
    RELATIVE_POSITION_BUCKET = "relative_position_bucket"
    RECIPROCAL = "reciprocal"
    RELU = "relu"
    RELU2 = "relu2"
    REPEAT = "repeat"
    REPEAT_INTERLEAVE = "repeat_interleave"
    REPEAT_KV = "repeat_kv"
    RESIZE = "resize"
    RMS_NORM = "rms_norm"
    ROTARY = "rotary"
    ROUTER_LOGITS = "router_logits"
    RSQRT = "rsqrt"
    SAFE_SOFTMAX = "safe_softmax"
    SCATTER = "scatter"
    SHIFT_LABELS = "shift_labels"
    SHIFT_RIGHT = "shift_right"
    SIGMOID = "sigmoid"
    SIGN = "sign"
    SILU = "silu"
    SIN = "sin"
    SLICE = "slice"
    SMOOTH_L1 = "smooth_l1"
    SOFTMAX = "softmax"
    SOFTPLUS = "softplus"
    SOLVE_TRIANGULAR = "solve_triangular"
    SORT = "sort"
    SPLIT = "split"
    SQRT = "sqrt"
    STATE_SPACE_SCAN = "state_space_scan"
    SUB = "sub"
    SUM = "sum"
    TANH = "tanh"
    TILED_CROSS_ENTROPY = "tiled_cross_entropy"
    TILED_LOSS = "tiled_loss"
    TILED_LOSS_GRADIENTS = "tiled_loss_gradients"
    TILED_NETWORK = "tiled_network"
    TO = "to"
    TOPK = "topk"
    TRANSPOSE = "transpose"
    TRIL = "tril"
    TRIU = "triu"
    UNPACK = "unpack"
    UNIFORM_IN_PLACE = "uniform_"
    UPSAMPLE = "upsample"
    VIEW = "view"
    VECTOR_NORM = "vector_norm"
    VIEW_AS_REAL = "view_as_real"
    VOCAB_PARALLEL_CROSS_ENTROPY = "vocab_parallel_cross_entropy"
    WHERE = "where"
    XIELU = "xielu"
    ZEROS = "zeros"


ATTENTION_KERNELS = frozenset(
    {
        OperationKind.CUDNN_ATTENTION,
        OperationKind.EFFICIENT_ATTENTION,
        OperationKind.FLASH_ATTENTION,
    }
)
"""Attention in one kernel, which keeps no scores and computes them again in backward."""
OUTPUT_LOSSES = frozenset(
    {
        OperationKind.CHUNKED_CROSS_ENTROPY,
        OperationKind.FUSED_LINEAR_CROSS_ENTROPY,
        OperationKind.TILED_LOSS_GRADIENTS,
    }
)
"""Output matrix and loss in one: the three products of their two passes are all made forward."""
QUANTIZED_PRODUCTS = frozenset(
    {OperationKind.LINEAR_4BIT, OperationKind.LINEAR_8BIT, OperationKind.LINEAR_AWQ}
)
"""A linear layer whose weight is unpacked in the operation itself."""
PRODUCTS = frozenset(
    {
        OperationKind.LINEAR,
        OperationKind.MATMUL,
        OperationKind.BADDBMM,
        *QUANTIZED_PRODUCTS,
    }
)
"""Products of matrices that cuBLAS computes."""
SECOND_FIRST = frozenset(
    {*PRODUCTS, OperationKind.MUL, OperationKind.DIV, OperationKind.GROUPED_MM}
)
"""Operations of two tensors whose second gradient is computed first."""
EXTERN_KERNELS = frozenset(
    {
        *PRODUCTS, *ATTENTION_KERNELS, *OUTPUT_LOSSES, OperationKind.ALL_GATHER, OperationKind.ALL_REDUCE,
        OperationKind.CONVOLUTION, OperationKind.COUNTED, OperationKind.REDUCE_SCATTER,
        OperationKind.CROSS_ENTROPY, OperationKind.CUMSUM, OperationKind.CUT_CROSS_ENTROPY,
        OperationKind.FFT, OperationKind.FUSED_GATE, OperationKind.FUSED_SOFTMAX,
        OperationKind.GROUPED_MM, OperationKind.HISTC, OperationKind.ROTARY, OperationKind.SCATTER,
        OperationKind.SOLVE_TRIANGULAR, OperationKind.SORT, OperationKind.STATE_SPACE_SCAN,
        OperationKind.TILED_CROSS_ENTROPY,
        OperationKind.TOPK,
        OperationKind.VOCAB_PARALLEL_CROSS_ENTROPY,
    }
)  # fmt: skip
"""What a compiled region calls as a kernel of its own: what it reads and makes is written."""
UNFUSIBLE_KINDS = EXTERN_KERNELS | {
    OperationKind.CAT, OperationKind.EMBEDDING, OperationKind.INDEX_SELECT, OperationKind.PAD,
}  # fmt: skip
"""What torch.compile never computes again (torch 2.13, torch/_functorch/partitioners.py,
``get_default_op_list``: what is not on its list)."""
RANDOM_KINDS = frozenset(
    {OperationKind.DROPOUT, OperationKind.GUMBEL, OperationKind.UNIFORM_IN_PLACE}
)
"""What draws random numbers."""
IN_PLACE_KINDS = frozenset(
    kind for kind in OperationKind if kind.value.endswith("_") or kind is OperationKind.RELU
)
"""What writes over its first input; a ReLU where its class says so."""
