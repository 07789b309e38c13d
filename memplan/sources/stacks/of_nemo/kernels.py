"""What computes in NeMo AutoModel's files: attention, norms, losses, experts' routes, compiled layers."""

from collections.abc import Mapping

from memplan.families.class_checks import WITHOUT_FLASH
from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.models import model_type

_LOSSES = {
    "MaskedCrossEntropy": None, "FusedLinearCrossEntropy": "cut", "ChunkedCrossEntropy": "unsloth",
    "TEParallelCrossEntropy": None,
}  # fmt: skip
"""``components/loss``: ``linear_ce.py`` calls cut-cross-entropy; ``chunked_ce.py`` keeps the logits in their own dtype and
makes a new tensor for their gradient, as Unsloth's does, a chunk of rows in fp32 at a time."""
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash3",
    "flash_attention_4": "flash", "te": "flash", "flex": "sdpa", "flex_attention": "sdpa",
    "tilelang": None, "cudnn": None, "torch": None,
}  # fmt: skip
"""``model.attn_implementation``, and ``model.backend.attn`` of AutoModel's own classes."""
_SPARSE = ("tilelang", "cudnn", "torch")
"""Attention of AutoModel's own for DeepSeek V4 and GLM's sparse layers (``BackendConfig``)."""
_NORMS = {"torch": "fused", "te": "fused", "quack": "fused", "torch_fp32": None}
"""``model.backend.rms_norm`` (``components/models/common/utils.py``): one kernel, or torch's own operations in fp32."""
_OTHER_KERNELS = {
    ("model.backend.rope", "quack"): "rotates in one kernel",
    ("model.backend.experts", "torch_mm_mxfp8"): "multiplies experts' matrices in 8 bits",
    ("model.backend.dispatcher", "mok"): "runs experts in one kernel",
}
"""Other values of ``BackendConfig`` than those that are modelled."""
_DISPATCHERS = {
    "torch": "the tokens of all ranks, which each gathers",
    **dict.fromkeys(("deepep", "hybridep", "uccl_ep"), "its own buffers of tokens for experts"),
}
"""How tokens come to experts, and what each needs beside what is counted."""
_RECIPES = {
    "current": "te-current", "block": "te-blockwise", "mxfp8": "te-mxfp8",
    "Float8CurrentScaling": "te-current", "Float8BlockScaling": "te-blockwise",
    "MXFP8BlockScaling": "te-mxfp8", "DelayedScaling": "te-delayed",
}  # fmt: skip
"""``model.backend.te_fp8.recipe`` (``components/models/common/utils.py``): a word, or a class of the package's."""
_SHARE_THEMSELVES = (
    "gemma4", "gemma4_text", "kimi_linear", "muse_glimmer", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
)  # fmt: skip
"""Types with windows or recurrent layers whose own classes share sequences (``supports_cp`` in ``components/models``)."""
_PACKAGE = ("flash", "flash3")
_OWN_ATTENTION = ("gpt_oss", "mimo_v2_flash")
"""Types whose class in transformers has no other attention than eager."""


def _read_own_loss(found: Found) -> None:
    """Transformer Engine's loss: the logits, in their own dtype, become their gradient (``te_parallel_ce.py``)."""
    if found.fields.get("tensor_parallel") in (None, 1):
        found.fields["loss"] = "flash_attn"
    else:
        found.notes.append(
            "loss_fn: Transformer Engine's keeps the logits alone, which is not modelled beside "
            "tensor_parallel: the figures are upper bounds"
        )


def read_kernels(keys: Keys, found: Found) -> None:
    """Attention, norms, the loss, experts and compilation."""
    for (key, value), what in _OTHER_KERNELS.items():
        if keys.text(key) == value:
            found.notes.append(
                f"{key} {value} {what}, which is not modelled: the figures are upper bounds"
            )
    if keys.choice("model.backend.rms_norm", _NORMS) is not None:
        found.fields["norm"] = _NORMS[str(keys.text("model.backend.rms_norm"))]
    own = keys.choice("model.backend.attn", _ATTENTION)
    if keys.text("model.backend.attn") in _SPARSE:
        found.notes.append(
            f"model.backend.attn {keys.text('model.backend.attn')} attends in kernels of AutoModel's own, which are not "
            "modelled: the figures are upper bounds"
        )
    found.fields["attention"] = keys.choice("model.attn_implementation", _ATTENTION) or own
    if model_type(found.model) in _OWN_ATTENTION and found.fields["attention"] not in (
        None,
        "eager",
    ):
        found.fields["attention"] = None
        found.notes.append(
            "AutoModel's own class runs attention with sinks in a kernel; transformers' class, which is counted, "
            "has eager alone: the figures are upper bounds"
        )
    elif found.fields["attention"] in _PACKAGE and model_type(found.model) in WITHOUT_FLASH:
        found.fields["attention"] = None
        found.notes.append(
            "AutoModel's own class attends in the package's kernel; transformers' class, which is counted, cannot"
        )
    if found.fields.get("context_parallel", 1) == 1:
        pass
    elif model_type(found.model) in _SHARE_THEMSELVES:
        found.fields["attention"] = None
        found.options["context_parallel_in_classes"] = True
        found.left_out.append(
            "distributed.cp_size in AutoModel's own layers (what they hold of other ranks' keys, values and states; a ring of "
            "torch's is counted)"
        )
    elif keys.text("model.backend.attn") == "te":
        found.fields["attention"] = None
        found.left_out.append(
            "model.backend.attn te beside cp_size (what its ring keeps of each step until the last; torch's is counted)"
        )
    _read_compilation(keys, found)
    _read_routing(keys, found)
    loss = (keys.text("loss_fn._target_") or "").rpartition(".")[2]
    if _LOSSES.get(loss):
        found.fields["loss"] = _LOSSES[loss]
    elif loss == "MaskedCrossEntropy" and keys.take("loss_fn.fp32_upcast") is False:
        found.fields["loss"] = "uncast"
    elif loss == "TEParallelCrossEntropy":
        _read_own_loss(found)
    if keys.section("model.backend.te_fp8"):
        _read_narrow(keys, found)


def _read_narrow(keys: Keys, found: Found) -> None:
    """Transformer Engine's modules under a recipe (``TEFp8Config``): linear layers where they are its own, and its experts."""
    recipe = keys.take("model.backend.te_fp8.recipe")
    if isinstance(recipe, Mapping):  # an object of the package's: by the name of its class
        recipe = str(recipe.get("_target_")).rpartition(".")[2]
    named = str(recipe or "current")
    if named not in _RECIPES:
        keys.refuse(
            "model.backend.te_fp8.recipe",
            f"{named} is not modelled. There are: {', '.join(_RECIPES)}",
        )
    if keys.text("model.backend.linear") != "torch":
        found.notes.append("model.backend.te_fp8: linear layers of Transformer Engine in 8 bits")
        found.fields["fp8"] = _RECIPES[named]
    if keys.text("model.backend.experts") == "te":
        found.left_out.append(
            "model.backend.te_fp8 of experts te (narrow copies of what experts multiply)"
        )


def _read_routing(keys: Keys, found: Found) -> None:
    """A router of a benchmark's gives each expert as many tokens, unless noise is asked for (``FakeBalancedGate``)."""
    balanced, noise = (
        keys.flag("model.backend.fake_balanced_gate"),
        keys.number("model.backend.fake_gate_noise"),
    )
    dispatcher = keys.text("model.backend.dispatcher")
    if "expert_parallel" not in found.fields:
        return
    if balanced and not noise:
        found.fields["expert_imbalance"] = 1
    if dispatcher in _DISPATCHERS:
        found.left_out.append(f"model.backend.dispatcher {dispatcher} ({_DISPATCHERS[dispatcher]})")


def _read_compilation(keys: Keys, found: Found) -> None:
    """The model without its loss, which is called apart, and cut at every unit by the hooks that gather it
    (``components/utils/compile_utils.py``): layer by layer is nearest."""
    asked = [keys.flag("compile.enabled"), keys.flag("distributed.enable_compile")]
    found.fields["compile"] = "layer" if any(asked) else "none"
    if asked[0]:
        found.notes.append(
            "compile.enabled leaves the loss eager: counted as each layer compiled by itself"
        )
