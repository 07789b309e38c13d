"""Quantized frozen bases: how a linear layer's weight is packed, and what multiplies with it.

Pure data, as bitsandbytes 0.50.2, GPTQModel 7 and transformers 5.23 have it. The table of
``QUANTIZED_FORMATS`` is the whole truth about what a format stores: adding one is adding a row, with
one of the products of ``memplan.graph.replacing.quantized``.

Nomenclature: a matrix has ``out`` rows of ``in`` elements, ``n`` in all; ``B`` is the block size,
``g`` the size of a group of a row's elements.

References
----------
.. [1] T. Dettmers, A. Pagnoni, A. Holtzman, and L. Zettlemoyer, "QLoRA: Efficient finetuning of
   quantized LLMs," NeurIPS 2023. arXiv:2305.14314.
.. [2] T. Dettmers, M. Lewis, Y. Belkada, and L. Zettlemoyer, "LLM.int8(): 8-bit matrix
   multiplication for transformers at scale," NeurIPS 2022. arXiv:2208.07339.
.. [3] E. Frantar, S. Ashkboos, T. Hoefler, and D. Alistarh, "GPTQ: Accurate post-training
   quantization for generative pre-trained transformers," ICLR 2023. arXiv:2210.17323.
.. [4] J. Lin et al., "AWQ: Activation-aware weight quantization for on-device LLM compression and
   acceleration," MLSys 2024. arXiv:2306.00978.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto

from memplan.dtypes import DType
from memplan.errors import SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.text import shown
from memplan.units import ceil_div


class QuantizationKind(Enum):
    """Formats of a quantized base, by the names that a setup takes."""

    NF4 = "nf4"
    """bitsandbytes' 4-bit NormalFloat [1]_."""
    FP4 = "fp4"
    """bitsandbytes' 4-bit float."""
    INT8 = "int8"
    """bitsandbytes' LLM.int8() [2]_."""
    GPTQ = "gptq"
    """GPTQ [3]_, multiplied as GPTQModel does in training."""
    AWQ = "awq"
    """AWQ [4]_, as GPTQModel's GEMM layers multiply it."""


class QuantizedProduct(Enum):
    """What multiplies with a packed weight."""

    BNB_4BIT = auto()
    """``MatMul4Bit``: unpacked for each product, forward and backward, and kept by none."""
    BNB_INT8 = auto()
    """``MatMul8bitLt``: integers forward, unpacked backward; its context holds the input."""
    GPTQ_TORCH = auto()
    """Unpacked, and multiplied by ``torch.matmul``, which keeps the unpacked weight."""
    AWQ_GEMM = auto()
    """``AwqGemmFn``: unpacked for each product; keeps the input."""


class Upcast(Enum):
    """What of a quantized model is cast to fp32 before it is trained."""

    NONE = "none"
    ALL = "all"
    """All that is left in 16 bits: peft's ``prepare_model_for_kbit_training``."""
    NORMS = "norms"
    """Norms alone, as LLaMA-Factory's ``upcast_layernorm`` does."""


WHOLE_ROW = -1
"""What GPTQ and AWQ call a group that is all of a row."""
NOT_QUANTIZED = "none"
"""What a setup says where the base is kept as it is, whatever the model's config says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How a frozen base is quantized (``BitsAndBytesConfig``, ``GPTQConfig``, ``AwqConfig``).

    Raises ``SetupError`` for values that cannot be.

    >>> str(Quantization(kind=QuantizationKind.NF4, double_quant=True))
    'nf4, blocks of 64, double quantization'
    """

    kind: QuantizationKind
    bits: int = 4
    """Of a code, where the format has several widths (GPTQ)."""
    block_size: int = 0
    """Elements that share a scale: bitsandbytes' blocks, or a group within a row. 0: the format's; -1
    a whole row (``group_size=-1``)."""
    double_quant: bool = False
    """The scales are quantized too (``bnb_4bit_use_double_quant``)."""
    compute_dtype: DType | None = None
    """What a 4-bit layer unpacks to and computes in (``bnb_4bit_compute_dtype``). None: the setup's
    16 bits, as scripts say it; ``BitsAndBytesConfig`` by itself has fp32."""
    storage_dtype: DType | None = None
    """The format that packed 4-bit codes go by (``bnb_4bit_quant_storage``). None: uint8, and where
    parameters are sharded the setup's 16 bits, since integers are not."""
    prepared: Upcast = Upcast.NONE
    """Whether peft's ``prepare_model_for_kbit_training`` was called, or its like."""
    skip_modules: tuple[str, ...] = ()
    """Further linear layers that stay (``llm_int8_skip_modules``), by the ends of their names."""
    keeps_inputs: bool = False
    """Every 4-bit product holds its input to its backward: bitsandbytes before 0.43.2."""
    prequantized: bool = False
    """The checkpoint holds the codes; else each weight comes to the GPU as it is, and is packed there
    before the next one is read: transformers quantizes while it loads, in one thread
    (``convert_and_load_state_dict_in_model``)."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, QuantizationKind):
            self._set("kind", kind_named(self.kind))
        row = QUANTIZED_FORMATS[self.kind]
        self._set("double_quant", _flag("double_quant", self.double_quant))
        self._set("keeps_inputs", _flag("quant_keeps_inputs", self.keeps_inputs))
        self._set("prepared", _upcast(self.prepared))
        if self.compute_dtype is not None:
            self._set("compute_dtype", _dtype("compute_dtype", self.compute_dtype, _FLOATING))
        if self.storage_dtype is not None:
            self._set("storage_dtype", _dtype("quant_storage", self.storage_dtype, DTYPES))
        self._set("skip_modules", _module_names(self.skip_modules))
        self._set("bits", _number("bits", self.bits))
        self._set("block_size", _number("block_size", self.block_size) or row.block_size)
        self._check(row)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self, row: "QuantizedFormat") -> None:
        if self.double_quant and not row.has_double_quant:
            msg = f"quantize: double_quant: {self.kind.value} has none; nf4 and fp4 have"
            raise SetupError(msg)
        if self.keeps_inputs and not row.has_double_quant:
            msg = f"quantize: quant_keeps_inputs: {self.kind.value} has none; nf4 and fp4 have"
            raise SetupError(msg)
        if self.storage_dtype is not None and not row.has_storage:
            msg = f"quantize: quant_storage: {self.kind.value} is stored in one way; nf4 and fp4 are not"
            raise SetupError(msg)
        if self.compute_dtype is not None and row.product is not QuantizedProduct.BNB_4BIT:
            msg = f"quantize: compute_dtype: {self.kind.value} computes in what it is given"
            raise SetupError(msg)
        if self.bits not in row.widths:
            widths = " or ".join(map(str, row.widths))
            msg = f"quantize: {self.kind.value} has codes of {widths} bits, not {self.bits}"
            raise SetupError(msg)
        whole_rows = self.block_size == WHOLE_ROW and row.block_word == "groups"
        if row.block_sizes and self.block_size not in row.block_sizes and not whole_rows:
            sizes = ", ".join(map(str, row.block_sizes))
            msg = (
                f"quantize: {self.kind.value} has blocks of {sizes} elements, not {self.block_size}"
            )
            raise SetupError(msg)

    def __str__(self) -> str:
        parts = [self.kind.value]
        row = QUANTIZED_FORMATS[self.kind]
        if len(row.widths) > 1:
            parts.append(f"{self.bits} bits")
        if self.block_size == WHOLE_ROW:
            parts.append("a scale for each row")
        elif row.block_sizes:
            parts.append(f"{row.block_word} of {self.block_size}")
        if self.double_quant:
            parts.append("double quantization")
        if self.storage_dtype not in (None, DType.UINT8):
            parts.append(f"stored as {self.storage_dtype.label}")
        return ", ".join(parts)

    @property
    def scale_words(self) -> str:
        """What lies beside the codes, with its bytes for a matrix of n elements."""
        row = self.format
        formula = row.double_formula if self.double_quant else row.scale_formula
        return f"scales of {self.kind.value} codes, {formula} B of n weights"

    @property
    def upcast(self) -> Upcast:
        """What is cast to fp32, as far as the preparation casts for this format."""
        return self.prepared if self.format.is_prepared else Upcast.NONE

    @property
    def format(self) -> "QuantizedFormat":
        """The row of the table."""
        return QUANTIZED_FORMATS[self.kind]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that unpacking needs beside the codes."""

    name: str
    numel: int
    dtype: DType


Codes = Callable[[int, int, Quantization], tuple[tuple[int, ...], DType]]
"""The packed tensor of an ``out x in`` matrix: its shape and format."""
States = Callable[[int, int, Quantization], tuple[StateTensor, ...]]
"""What lies beside it, in the order in which it is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedFormat:
    """One format."""

    codes: Codes
    states: States
    product: QuantizedProduct
    widths: tuple[int, ...]
    """Bits that a code may have."""
    block_size: int
    """Where nothing else is said."""
    block_sizes: tuple[int, ...]
    """All that there are; empty where a scale is a row's."""
    block_word: str = "blocks"
    formula: str
    """Bytes of a matrix's codes, in words."""
    scale_formula: str
    """Bytes beside them."""
    double_formula: str = ""
    """The same with double quantization."""
    source: str
    has_double_quant: bool = False
    has_storage: bool = False
    """The packed tensor's format can be chosen."""
    is_prepared: bool = True
    """``prepare_model_for_kbit_training`` casts the rest to fp32; it leaves GPTQ's alone."""
    cloned_by_adapter: bool = False
    """peft's layer copies the product before it adds to it."""
    is_calibrated: bool = False
    """Packing needs data, so that a checkpoint always holds the codes."""


# -- what each stores --------------------------------------------------------------------------------


def packed_4bit(out: int, width: int, how: Quantization) -> tuple[tuple[int, ...], DType]:
    """Two codes in a byte, as one column of the storage format.

    Equation: ``(n + 1) // (2·itemsize)`` elements (bitsandbytes/backends/cuda/ops.py,
    ``quantize_4bit``).

    >>> packed_4bit(1024, 4096, Quantization(kind=QuantizationKind.NF4))[0]
    (2097152, 1)
    """
    storage = how.storage_dtype or DType.UINT8
    return ((out * width + 1) // (2 * storage.num_bytes), 1), storage


DYNAMIC_MAP = 256
"""Values of the 8-bit code that scales are quantized in (``create_dynamic_map``)."""
STATISTICS_BLOCK = 256
"""Scales that share one in turn (functional.py, ``quantize_4bit``: ``blocksize=256``)."""
MAP_4BIT = 16
"""Values of a 4-bit code (``get_4bit_type``)."""


def states_4bit(out: int, width: int, how: Quantization) -> tuple[StateTensor, ...]:
    """A scale for each block; with double quantization in 8 bits, with scales of their own.

    Equation: ``4·n/B``, or ``n/B + 4·n/(256 B)`` and maps (functional.py, ``quantize_4bit`` and
    ``quantize_blockwise``).

    >>> kind = QuantizationKind.NF4
    >>> [each.name for each in states_4bit(64, 64, Quantization(kind=kind))]
    ['absmax', 'code']
    """
    blocks = ceil_div(out * width, how.block_size)
    code = StateTensor("code", MAP_4BIT, DType.FP32)
    if not how.double_quant:
        return (StateTensor("absmax", blocks, DType.FP32), code)
    return (
        code,
        StateTensor("offset", 1, DType.FP32),
        StateTensor("absmax", blocks, DType.UINT8),
        StateTensor("nested absmax", ceil_div(blocks, STATISTICS_BLOCK), DType.FP32),
        StateTensor("nested code", DYNAMIC_MAP, DType.FP32),
    )


def packed_int8(out: int, width: int, how: Quantization) -> tuple[tuple[int, ...], DType]:
    """A byte for each element (nn/modules.py, ``Int8Params``)."""
    del how
    return (out, width), DType.INT8


def states_int8(out: int, width: int, how: Quantization) -> tuple[StateTensor, ...]:
    """A scale for each row (``int8_vectorwise_quant``)."""
    del width, how
    return (StateTensor("SCB", out, DType.FP32),)


WORD_BITS = 32
"""GPTQ and AWQ pack codes into int32."""


def _groups(width: int, how: Quantization) -> int:
    return 1 if how.block_size == WHOLE_ROW else ceil_div(width, how.block_size)


def packed_gptq(out: int, width: int, how: Quantization) -> tuple[tuple[int, ...], DType]:
    """Codes of a column in words (GPTQModel nn_modules/qlinear, ``_register_gptq_buffers``)."""
    return (ceil_div(width * how.bits, WORD_BITS), out), DType.INT32


def states_gptq(out: int, width: int, how: Quantization) -> tuple[StateTensor, ...]:
    """For each group zeros and 16-bit scales; the group of each input."""
    groups = _groups(width, how)
    zeros = groups * ceil_div(out * how.bits, WORD_BITS)
    return (
        StateTensor("qzeros", zeros, DType.INT32),
        StateTensor("scales", groups * out, DType.FP16),
        StateTensor("g_idx", width, DType.INT32),
    )


def packed_awq(out: int, width: int, how: Quantization) -> tuple[tuple[int, ...], DType]:
    """Codes of a row in words (GPTQModel nn_modules/qlinear, ``AWQuantLinear``)."""
    return (width, out // (WORD_BITS // how.bits)), DType.INT32


def states_awq(out: int, width: int, how: Quantization) -> tuple[StateTensor, ...]:
    """For each group zeros and 16-bit scales."""
    groups = _groups(width, how)
    return (
        StateTensor("qzeros", groups * (out // (WORD_BITS // how.bits)), DType.INT32),
        StateTensor("scales", groups * out, DType.FP16),
    )


_BNB_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""functional.py, ``quantize_4bit``."""
_BNB_SOURCE = "bitsandbytes 0.50.2, functional.py quantize_4bit"
_GROUPS = (16, 32, 64, 128, 256, 512, 1024)
"""GPTQModel, ``SUPPORTS_GROUP_SIZE``."""


def _four_bit() -> QuantizedFormat:
    return QuantizedFormat(
        codes=packed_4bit, states=states_4bit, product=QuantizedProduct.BNB_4BIT, widths=(4,),
        block_size=64, block_sizes=_BNB_BLOCKS, has_double_quant=True, has_storage=True,
        cloned_by_adapter=True, source=_BNB_SOURCE,
        formula="n/2", scale_formula="4·n/block", double_formula="n/block + 4·n/(256·block), and maps,",
    )  # fmt: skip


QUANTIZED_FORMATS: Mapping[QuantizationKind, QuantizedFormat] = {
    QuantizationKind.NF4: _four_bit(),
    QuantizationKind.FP4: _four_bit(),
    QuantizationKind.INT8: QuantizedFormat(
        codes=packed_int8, states=states_int8, product=QuantizedProduct.BNB_INT8, widths=(4,),
        block_size=0, block_sizes=(), formula="n", scale_formula="4·rows",
        source="bitsandbytes 0.50.2, nn/modules.py Int8Params",
    ),
    QuantizationKind.GPTQ: QuantizedFormat(
        codes=packed_gptq, states=states_gptq, product=QuantizedProduct.GPTQ_TORCH,
        widths=(2, 3, 4, 8), block_size=128, block_sizes=_GROUPS, block_word="groups",
        formula="bits·n/8", scale_formula="(2 + bits/8)·n/group + 4·columns", is_prepared=False,
        source="GPTQModel 7, nn_modules/qlinear/torch.py", is_calibrated=True,
    ),
    QuantizationKind.AWQ: QuantizedFormat(
        codes=packed_awq, states=states_awq, product=QuantizedProduct.AWQ_GEMM, widths=(4,),
        block_size=128, block_sizes=_GROUPS, block_word="groups",
        formula="n/2", scale_formula="2.5·n/group", source="GPTQModel 7, nn_modules/qlinear/gemm_awq.py",
        is_calibrated=True,
    ),
}  # fmt: skip
"""Every format that is modelled."""


# -- as a setup says it ------------------------------------------------------------------------------

DTYPES: Mapping[str, DType] = {
    "fp32": DType.FP32, "float32": DType.FP32, "bf16": DType.BF16, "bfloat16": DType.BF16,
    "fp16": DType.FP16, "float16": DType.FP16, "uint8": DType.UINT8,
}  # fmt: skip
"""Formats by the names that options and configs call them."""
_FLOATING = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating}


def kind_named(value: object) -> QuantizationKind:
    """The format of this name.

    Raises ``SetupError`` for names that mean none.
    """
    name = str(value).lower().replace("bnb-", "").replace("bnb_", "")
    name = _MEANT.get(name, name)
    known = [each.value for each in QuantizationKind]
    if name not in known:
        hint = did_you_mean(name, known)
        msg = f"quantize: {shown(value)} is not one of none, {', '.join(known)}.{hint}"
        raise SetupError(msg)
    return QuantizationKind(name)


_MEANT = {"8bit": "int8", "llm_int8": "int8", "llm.int8": "int8"}
"""What people call formats elsewhere."""


def _upcast(value: object) -> Upcast:
    if isinstance(value, Upcast):
        return value
    if isinstance(value, str) and value.lower() in [each.value for each in Upcast]:
        return Upcast(value.lower())
    try:
        return Upcast.ALL if _flag("prepare_for_kbit", value) else Upcast.NONE
    except SetupError as error:
        msg = f"{error}, or norms"
        raise SetupError(msg) from None


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    msg = f"quantize: {name}: expected true or false, got {shown(value)}"
    raise SetupError(msg)


def _dtype(name: str, value: object, known: Mapping[str, DType]) -> DType:
    if isinstance(value, DType) and value in known.values():
        return value
    found = known.get(str(value).rsplit(".", maxsplit=1)[-1].lower())
    if found is None:
        names = ", ".join(dict.fromkeys(each.label for each in known.values()))
        msg = f"quantize: {name}: expected one of {names}, got {shown(value)}"
        raise SetupError(msg)
    return found


def _number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"quantize: {name}: expected a whole number, got {shown(value)}"
        raise SetupError(msg)
    return value


def _module_names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        msg = f"quantize: skip_modules: expected names of modules, got {shown(value)}"
        raise SetupError(msg)
    return tuple(each.strip() for each in names if each.strip())
