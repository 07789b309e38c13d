"""What CUDA's dispatcher would do with fake tensors, where torch cannot ask a card that is not there."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional
import transformers.masking_utils as masking

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.hardware.gpu import GpuSpec
from memplan.training.choices_of_kernels.sdpa import (
    ScoreKernel,
    SdpaCall,
    choose_sdpa_kernel,
    sdpa_support,
)

FORMATS = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
ALIGNED = 8
"""Heads of flash attention are padded to a multiple of this (torch's ``pad_last_dim``)."""


UNCHECKED = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Set, transformers does not look whether there are as many placeholders as pictures have tokens."""


@contextlib.contextmanager
def pretended_kernels(gpu: GpuSpec) -> Iterator[None]:
    """Have attention choose its kernel as on this card, and masks read no values."""
    changes: dict[str, object] = {
        # Rows are one sequence each, and masks hide nothing: what real tensors are looked at for.
        "find_packed_sequence_indices": lambda *_, **__: None,
        "fast_all": lambda *_, **__: True,
        "is_tracing": lambda *_: False,
    }
    kept = {name: getattr(masking, name) for name in changes if hasattr(masking, name)}
    real = torch.nn.functional.scaled_dot_product_attention
    for name in kept:
        setattr(masking, name, changes[name])
    torch.nn.functional.scaled_dot_product_attention = _attention_on(gpu)
    checked = os.environ.get(UNCHECKED)
    os.environ[UNCHECKED] = "1"
    try:
        yield
    finally:
        if checked is None:
            del os.environ[UNCHECKED]
        else:
            os.environ[UNCHECKED] = checked
        torch.nn.functional.scaled_dot_product_attention = real
        for name, value in kept.items():
            setattr(masking, name, value)


def _attention_on(gpu: GpuSpec) -> Callable[..., Any]:
    support = sdpa_support(gpu)

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.is_autocast_enabled("cuda"):
            half = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(half), key.to(half), value.to(half)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(half)
        call = SdpaCall(
            dtype=FORMATS[query.dtype],
            head_dim=query.shape[-1],
            value_head_dim=value.shape[-1],
            queries=query.shape[-2],
            keys=key.shape[-2],
            masked=attn_mask is not None,
            trained_mask=attn_mask is not None and attn_mask.requires_grad,
            dropout=dropout_p > 0,
            grouped=key.shape[-3] != query.shape[-3],
        )
        kernel = choose_sdpa_kernel(call, support)
        return _KERNELS[kernel](
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )

    return attention


def _flash(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, gqa: bool,  # noqa: ARG001
) -> Any:  # fmt: skip
    size = query.shape[-1]
    padding = -size % ALIGNED
    if padding:
        query, key, value = (
            torch.nn.functional.pad(each, (0, padding)) for each in (query, key, value)
        )
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query,
        key,
        value,
        dropout,
        causal,
        False,
        scale=scale or size**-0.5,
    )[0]
    return out[..., :size] if padding else out


def _efficient(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, gqa: bool,  # noqa: ARG001
) -> Any:  # fmt: skip
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        _as_bias(mask, query, key),
        True,
        dropout,
        causal,
        scale=scale,
    )[0]


def _cudnn(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, gqa: bool,  # noqa: ARG001
) -> Any:  # fmt: skip
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        query,
        key,
        value,
        _as_bias(mask, query, key),
        True,
        dropout,
        causal,
        False,
        scale=scale,
    )[0]


def _math(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, gqa: bool,
) -> Any:  # fmt: skip
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa
    )[0]


def _eager(*_: object) -> Any:
    msg = "attention: the dispatcher was asked for a kernel of the eager form"
    raise SetupError(msg)


_KERNELS: dict[ScoreKernel, Callable[..., Any]] = {
    ScoreKernel.FLASH: _flash,
    ScoreKernel.EFFICIENT: _efficient,
    ScoreKernel.CUDNN: _cudnn,
    ScoreKernel.MATH: _math,
    ScoreKernel.EAGER: _eager,
}


def _as_bias(mask: Any, query: Any, key: Any) -> Any:
    """A mask as kernels read it: numbers that are added, one for each score."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        hidden = mask.logical_not()
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
