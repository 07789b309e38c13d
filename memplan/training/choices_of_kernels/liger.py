"""Which of its kernels Liger puts into which model.

``use_liger_kernel`` calls ``_apply_liger_kernel_to_instance``, which looks the model's type up and calls
a function of its own for it; a type that is not there is passed over with a line in the log. Read in
liger-kernel 0.8.5, transformers/monkey_patch.py, ``MODEL_TYPE_TO_APPLY_LIGER_FN``.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass
from memplan.training.choices_of_kernels.kernels import (
    FeedForwardKernel,
    LossKernel,
    NormKernel,
    RotaryKernel,
)

LIGER_VERSION = "0.8.5"


@dataclass(frozen=True, kw_only=True, slots=True)
class LigerKernels:
    """What Liger puts in the place of a model's own, unless it is told otherwise."""

    norm: NormKernel = NormKernel.LIGER
    mlp: FeedForwardKernel = FeedForwardKernel.FUSED
    rotary: RotaryKernel = RotaryKernel.LIGER
    loss: LossKernel = LossKernel.FUSED_LINEAR
    beside: str = ""
    """What it replaces besides, that is counted as the class's own."""


_ALL = LigerKernels()
_NORMS_APART = LigerKernels(norm=NormKernel.LIGER_APART)
_NO_ROTARY_APART = LigerKernels(norm=NormKernel.LIGER_APART, rotary=RotaryKernel.EAGER)
_NO_MLP = LigerKernels(mlp=FeedForwardKernel.EAGER)
_EXPERTS = "Liger's fused experts"
_MIXTURE = LigerKernels(beside=_EXPERTS)
_LATENT = LigerKernels(rotary=RotaryKernel.EAGER, beside=_EXPERTS)

LIGER_MODELS: dict[str, LigerKernels] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "falcon_h1",
         "hunyuan_v1_dense", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "mllama",
         "mllama_text_model", "llava", "internvl", "smolvlm", "pixtral", "paligemma"),
        _ALL,
    ),
    **dict.fromkeys(("mixtral", "qwen3_moe", "hunyuan_v1_moe"), _MIXTURE),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3", "exaone4", "muse_glimmer"),
        _NORMS_APART,
    ),
    **dict.fromkeys(("glm4", "glm4v", "gemma4", "gemma4_text"), _NO_ROTARY_APART),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _NO_ROTARY_APART),
    **dict.fromkeys(
        ("glm4v_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
        LigerKernels(
            norm=NormKernel.LIGER_APART, rotary=RotaryKernel.EAGER, beside=_EXPERTS
        ),
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    "deepseek_v4": LigerKernels(rotary=RotaryKernel.EAGER, mlp=FeedForwardKernel.EAGER),
    **dict.fromkeys(("gpt_oss", "qwen3_vl", "qwen3_vl_text"), _NO_MLP),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), _NO_MLP),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        LigerKernels(rotary=RotaryKernel.EAGER, beside="Liger's rotary embeddings"),
    ),
    "granite": LigerKernels(loss=LossKernel.LIGER),
    "nemotron": LigerKernels(norm=NormKernel.EAGER, rotary=RotaryKernel.EAGER),
}  # fmt: skip
"""By transformers' ``model_type``; of others the class's own kernels stay, all of them."""

_PRESET = {"norm": _ALL.norm, "mlp": _ALL.mlp, "rotary": _ALL.rotary, "loss": _ALL.loss}


def liger_overrides(family: str) -> dict[str, Enum]:
    """What of a model's kernels is not as in the preset, by the names of a setup's fields.

    >>> sorted(liger_overrides("llama")), liger_overrides("granite")
    ([], {'loss': <LossKernel.LIGER: 'liger'>})
    """
    found = LIGER_MODELS.get(family)
    if found is None:
        return {
            "norm": NormKernel.EAGER, "mlp": FeedForwardKernel.EAGER,
            "rotary": RotaryKernel.EAGER, "loss": LossKernel.EAGER,
        }  # fmt: skip
    return {name: each for name in _PRESET if (each := getattr(found, name)) is not _PRESET[name]}


def liger_note(family: str) -> str:
    """What to say of Liger beside the figures of a model; empty where it has all kernels.

    >>> liger_note("gpt2")
    'Liger 0.8.5 has no kernels for gpt2: all are counted as transformers has them'
    """
    found = LIGER_MODELS.get(family)
    if found is None:
        return (
            f"Liger {LIGER_VERSION} has no kernels for {family}: all are counted as transformers "
            "has them"
        )
    return f"{found.beside} are counted as the class's own" if found.beside else ""
