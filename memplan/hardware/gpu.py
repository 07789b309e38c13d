"""A GPU as data: what it can hold, how fast it computes, and what it is linked to.

The bytes that a training run may use are neither the number on the box nor what ``nvidia-smi``
shows: ``GpuSpec.capacity_bytes`` says which figure counts, and ``capacity_note`` whether it had to
be derived.
"""

from enum import Enum

from memplan.errors import InputError
from memplan.fast_dataclass import dataclass, fields
from memplan.hardware.managers import MemoryManager
from memplan.units import GIB, MIB, format_gib
from memplan.upward import provided

FLASH_ATTENTION_COMPUTE_CAPABILITY = (8, 0)
"""The oldest CUDA device that torch's flash attention runs on.

torch: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``,
``check_flash_attention_hardware_support`` (sm_80 to sm_121).
"""

BF16_COMPUTE_CAPABILITY = (8, 0)
"""The oldest CUDA device that multiplies bf16 in hardware: Ampere."""

DRIVER_SHORTFALL_PERCENT = 1
"""How far torch's total lies below the driver's, where torch's is not known [%].

0.3 to 3 % over the cards of the catalog that know both: 0.6 % on H100, 1.1 % on A100 80GB.
"""

NOMINAL_USABLE_PER_MILLE = 985
"""What torch sees of the nominal memory, read as GiB, where nothing else is known [per mille].

Fits HBM cards of the 80 GB class: 80 GiB show as 79.1 on A100, 96 GiB as 94.5 on GH200.
"""

USUAL_MULTIPROCESSORS = 132
_GROUPED_BYTES = {9: 4 * 128, 10: 42 * 128}
"""On each multiprocessor, by the compute capability's first number."""
"""Those of an H100."""

MIN_MEMORY_BYTES = 2**20
MAX_MEMORY_BYTES = 2**44
"""A device with less or more (16 TiB) is a typing error."""


class Vendor(Enum):
    """Who makes the GPU."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"
    INTEL = "Intel"
    APPLE = "Apple"
    HUAWEI = "Huawei"
    GOOGLE = "Google"
    AWS = "AWS"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class TflopsByDtype:
    """Matrix multiplication rates by number format [10^12 FLOP/s]; None: unsupported or unknown."""

    fp32: float | None = None
    """Without tensor cores."""
    tf32: float | None = None
    fp16: float | None = None
    """With fp32 accumulation, as torch multiplies; so are bf16 and fp8."""
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None

    def scaled(self, share: float) -> "TflopsByDtype":
        """The rates of a part of the card.

        >>> TflopsByDtype(bf16=100.0).scaled(0.25).bf16
        25.0
        """
        rates = {each.name: getattr(self, each.name) for each in fields(self)}
        return TflopsByDtype(**{key: rate and rate * share for key, rate in rates.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec:
    """What joins the GPUs of one node, PCIe apart."""

    kind: str
    """``NVLink4``, ``xGMI``, ``RoCE (24 x 200 GbE)``..."""
    bytes_per_s: int
    """One direction, over all links of one GPU; data sheets of NVIDIA print twice that."""
    pair_bytes_per_s: int | None = None
    """One direction between two GPUs, where that is less than all links together."""
    topology: str = ""

    @property
    def num_joined(self) -> int:
        """GPUs on one switch, where that joins several nodes; 0: those of a node.

        >>> LinkSpec(kind="NVLink5", bytes_per_s=900_000_000_000, topology="NVL72").num_joined
        72
        """
        digits = self.topology.removeprefix("NVL").partition(";")[0]
        return int(digits) if self.topology.startswith("NVL") and digits.isdecimal() else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieSpec:
    """The slot that a GPU sits in, or the equivalent."""

    generation: int
    bytes_per_s: int
    """One direction, 16 lanes, nominal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpec:
    """A usual machine that such GPUs sit in, or the share of one that is let with each."""

    name: str
    """Whose it is, such as ``AWS p5.48xlarge``."""
    memory_bytes: int
    """Its CPU RAM."""
    num_gpus: int
    source: str
    """Where that was read."""
    memory_bytes_per_s: int | None = None
    """What its sockets read and write together, nominal; None: not known."""

    def share_bytes(self, num_gpus: int) -> int:
        """CPU RAM that goes with so many of its GPUs: what others leave a job that has not all of them [bytes].

        >>> NodeSpec(name="n", memory_bytes=1024, num_gpus=8, source="").share_bytes(2)
        256
        """
        return self.memory_bytes * num_gpus // self.num_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One kind of GPU."""

    gpu_id: str
    """The catalog's name for it, such as ``h100-sxm-80gb``."""
    name: str
    """The vendor's name for it."""
    vendor: Vendor = Vendor.UNKNOWN
    manager: MemoryManager = MemoryManager.CUDA
    """Who hands its memory out."""
    architecture: str = ""
    compute_capability: tuple[int, int] | None = None
    """CUDA's; None for other vendors and for cards that are known by their memory alone."""
    form_factor: str = ""
    year: int | None = None
    num_multiprocessors: int | None = None
    """Streaming multiprocessors, or AMD's compute units."""
    memory_nominal_gb: float
    """The number on the box; most vendors count GiB and write GB."""
    memory_type: str = ""
    driver_total_bytes: int | None = None
    """Total memory as ``nvidia-smi`` prints it."""
    torch_total_bytes: int | None = None
    """``torch.cuda.get_device_properties().total_memory``."""
    bandwidth_bytes_per_s: int | None = None
    """Of the memory, by the data sheet."""
    dense_tflops: TflopsByDtype = TflopsByDtype()
    """Peak rates by the data sheet, without sparsity."""
    measured_tflops: TflopsByDtype = TflopsByDtype()
    """The best that large matrix multiplications were measured to reach."""
    link: LinkSpec | None = None
    pcie: PcieSpec | None = None
    node: NodeSpec | None = None
    """A usual node of it; None: not known."""
    has_bf16: bool
    """Whether it multiplies bf16 in hardware; torch emulates bf16 elsewhere, slowly."""
    device_names: tuple[str, ...] = ()
    """As torch and ``nvidia-smi`` print them."""
    aliases: tuple[str, ...] = ()
    """Short names that stand for this entry."""
    sources: tuple[str, ...] = ()
    """Where the figures were read."""
    notes: str = ""
    unverified: tuple[str, ...] = ()
    """The figures that were not read again from a source, by their key in the catalog."""
    taken_bytes: int = 0
    """What other processes have of this very card; of a kind of card, nothing."""

    def to_dict(self) -> dict[str, object]:
        """One row of ``memplan gpus --format json``."""
        found: dict[str, object] = provided("gpu_row", self)
        return found

    @property
    def is_listed(self) -> bool:
        """Whether it comes from the catalog, rather than from a user's description."""
        return bool(self.device_names)

    @property
    def short_name(self) -> str:
        """A name for the head of a column or a line: its first alias with its memory, else its first.

        >>> from memplan.sources.cards.catalog import load_gpu
        >>> [load_gpu(name).short_name for name in ("h100", "v100-16gb", "t4", "a100-pcie-40gb")]
        ['H100-80', 'V100-16', 'T4', 'A100-PCIE-40']
        """
        ending = f"-{self.memory_nominal_gb:g}gb"
        sized = [each for each in self.aliases if each.endswith(ending) and each.count("-") == 1]
        chosen = next(iter((*sized, *self.aliases[:1])), self.gpu_id)
        if not chosen.islower():
            return chosen
        return chosen.upper().removesuffix("GB") if chosen.endswith("gb") else chosen.upper()

    @property
    def capacity_bytes(self) -> int:
        """Bytes that one process can reach, its own CUDA context and NCCL included.

        What torch reports; where that is unknown, the driver's figure less 1 %; where that is
        unknown too, 98.5 % of the nominal memory. Less what other processes have of it.

        >>> card = GpuSpec(gpu_id="a", name="A", memory_nominal_gb=24, has_bf16=True)
        >>> card.capacity_bytes == 24 * 2**30 * 985 // 1000
        True
        """
        return max(0, self._whole_bytes - self.taken_bytes)

    @property
    def _whole_bytes(self) -> int:
        """Bytes that one process can reach of a card that nobody else uses."""
        if self.torch_total_bytes is not None:
            return self.torch_total_bytes
        if self.driver_total_bytes is not None:
            return self.driver_total_bytes * (100 - DRIVER_SHORTFALL_PERCENT) // 100
        return int(self.memory_nominal_gb * GIB) * NOMINAL_USABLE_PER_MILLE // 1000

    @property
    def is_capacity_derived(self) -> bool:
        """Whether no reading of its memory as torch sees it is known."""
        return bool(self._whole_note)

    @property
    def capacity_note(self) -> str:
        """How ``capacity_bytes`` was derived; empty where it is torch's own figure."""
        taken = f"less {format_gib(self.taken_bytes)} that others have" if self.taken_bytes else ""
        return ", ".join(filter(None, (self._whole_note, taken)))

    @property
    def _whole_note(self) -> str:
        if self.torch_total_bytes is not None:
            return ""
        if self.driver_total_bytes is not None:
            mib = self.driver_total_bytes // MIB
            return f"the driver's {mib} MiB less {DRIVER_SHORTFALL_PERCENT} %, torch's is unknown"
        share = NOMINAL_USABLE_PER_MILLE / 10
        return f"{share} % of the nominal {self.memory_nominal_gb:g} GiB, no reading is known"

    @property
    def supports_flash_attention(self) -> bool:
        """Whether torch's flash attention runs on it.

        CUDA devices from compute capability 8.0 on, and AMD's CDNA 2 and later through AOTriton
        (torch: the function that ``FLASH_ATTENTION_COMPUTE_CAPABILITY`` names); others have kernels of
        their own, or none. A card known by its memory alone is taken for a recent one.
        """
        if self.compute_capability is None:
            return self.manager.is_replayed
        return self.compute_capability >= FLASH_ATTENTION_COMPUTE_CAPABILITY


def num_multiprocessors(gpu: GpuSpec | None) -> int:
    """Streaming multiprocessors; an H100's where nothing is known."""
    known = gpu.num_multiprocessors if gpu is not None else None
    return known or USUAL_MULTIPROCESSORS


def grouped_workspace_bytes(gpu: GpuSpec | None) -> int:
    """What CUTLASS' grouped products in bf16 work in; 0: torch multiplies each group by itself.

    Cards of compute capability 9.0 and 10 have the kernel (torch 2.13, aten/src/ATen/native/cuda/GroupMM.cu): descriptors
    of tiles for each multiprocessor, and for Blackwell's its scheduler's (asked of torch's CUDA build for either).
    """
    capability = gpu.compute_capability if gpu is not None else (9, 0)
    if capability is None or capability[0] not in _GROUPED_BYTES:
        return 0
    return _GROUPED_BYTES[capability[0]] * num_multiprocessors(gpu)


def threads_per_multiprocessor(gpu: GpuSpec | None) -> int:
    """Threads that one multiprocessor holds: 1024 on Turing, 1536 on Ampere's and Ada's small cards.

    CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    capability = gpu.compute_capability if gpu is not None else None
    if capability is None or (capability[0] in (7, 8, 9, 10) and capability[1] == 0):
        return 2048
    return 1024 if capability[0] == 7 else 1536


def is_ampere(gpu: GpuSpec | None) -> bool:
    """Whether its compute capability is 8 or later; AMD's count as such (``get_device_capability``)."""
    capability = gpu.compute_capability if gpu is not None else None
    return capability is None or capability >= FLASH_ATTENTION_COMPUTE_CAPABILITY


def gpu_from_memory(total_bytes: int) -> GpuSpec:
    """Describe an unlisted card by its memory alone [bytes]; the figure is its capacity.

    It is taken for a card with bf16 and flash attention, and its notes say so. Raises
    ``InputError`` when no device can have that much memory.

    >>> card = gpu_from_memory(46 * 2**30)
    >>> card.gpu_id, card.short_name
    ('custom-46gib', '46GiB')
    """
    if not MIN_MEMORY_BYTES <= total_bytes <= MAX_MEMORY_BYTES:
        msg = f"a GPU cannot have {total_bytes} bytes of memory: give what it reports, as in 46GiB"
        raise InputError(msg)
    return GpuSpec(
        gpu_id=f"custom-{round(total_bytes / GIB, 2):g}gib",
        aliases=(f"{round(total_bytes / GIB, 2):g}GiB",),
        name=f"unlisted GPU, {format_gib(total_bytes)}",
        memory_nominal_gb=round(total_bytes / GIB, 2),
        torch_total_bytes=total_bytes,
        has_bf16=True,
        notes="Described by its memory alone: bf16 and flash attention are assumed.",
    )
