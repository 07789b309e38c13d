"""Who hands out a card's memory: PyTorch's caching allocator of CUDA and HIP, whose rules are replayed, or another.

Where it is another no figure of segments is exact: what is allocated at once is the low end of what is needed, what CUDA's allocator would reserve for
the same requests the high one. A compiler that lays a whole step out itself (XLA's, Neuron's) may need less than that at once: there only
what lies between steps is certain.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass


class MemoryManager(Enum):
    """Who hands the memory out; the value is the catalog's word."""

    CUDA = "cuda"
    """``c10/cuda/CUDACachingAllocator.cpp``, for HIP too."""
    XPU = "xpu"
    NPU = "npu"
    HPU = "hpu"
    MPS = "mps"
    XLA = "xla"
    NEURON = "neuron"

    @property
    def is_replayed(self) -> bool:
        """Whether its rules are those that runs are replayed by, compared with recorded runs."""
        return self is MemoryManager.CUDA

    @property
    def rules(self) -> "ManagerRules":
        """What is known of it. Only of those that are not replayed."""
        return RULES[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerRules:
    """What is known of an allocator that is not replayed, and where it was read."""

    words: str
    """What it is, and what was not checked."""
    resource: str
    """The extended resource by which Kubernetes' device plugin hands cards out; nothing: there is none."""
    compiles: bool = False
    """Whether a compiler lays a step's tensors out before it runs."""
    source: str

    @property
    def note(self) -> str:
        """For whoever reads the answer."""
        if self.compiles:
            ends = "what is kept between steps and what PyTorch on CUDA would reserve"
        else:
            ends = "what is allocated at once and what CUDA's allocator would reserve"
        return f"Memory here is handed out by {self.words}: the range is between {ends}, and no more exact"


RULES = {
    MemoryManager.XPU: ManagerRules(
        words="torch.xpu's caching allocator, whose sizes and pools are CUDA's, under other kernels, of which none was run",
        resource="gpu.intel.com/xe",
        source="pytorch/pytorch, c10/xpu/XPUCachingAllocator.cpp at 00d512ae; aten/src/ATen/native/mkldnn/xpu/Attention.cpp at 0067c6fa",
    ),
    MemoryManager.NPU: ManagerRules(
        words="torch_npu's caching allocator, whose sizes and pools are CUDA's, under other kernels, of which none was run",
        resource="huawei.com/Ascend910",
        source="Ascend/pytorch, torch_npu/csrc/core/npu/NPUCachingAllocator.cpp at 0045d0d1",
    ),
    MemoryManager.HPU: ManagerRules(
        words="Habana's own runtime, which was not read",
        resource="habana.ai/gaudi",
        source="not open",
    ),
    MemoryManager.MPS: ManagerRules(
        words="PyTorch's heaps of Metal (8 MiB, 32 MiB, 1 GiB and single ones), which are not replayed",
        resource="",
        source="pytorch/pytorch, aten/src/ATen/mps/MPSAllocator.h at 01f98b3e",
    ),
    MemoryManager.XLA: ManagerRules(
        words="XLA's compiler, which fuses, recomputes and pads as it likes",
        resource="google.com/tpu",
        compiles=True,
        source="openxla.org",
    ),
    MemoryManager.NEURON: ManagerRules(
        words="Neuron's compiler, which fuses, recomputes and pads as it likes",
        resource="aws.amazon.com/neuron",
        compiles=True,
        source="awsdocs-neuron.readthedocs-hosted.com",
    ),
}  # fmt: skip
