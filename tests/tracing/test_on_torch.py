"""``memplan.trace`` with torch, where it is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.errors import TraceError, UsageError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
]  # of other people's code
HAS_TORCH = find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
WIDTH, ROWS = 64, 500


def own_model() -> Any:
    """A decoder that nobody has heard of."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm(x)).split(WIDTH, dim=-1)
            heads = [each.view(batch, length, 4, WIDTH // 4).transpose(1, 2) for each in (q, k, v)]
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.down(nn.functional.gelu(self.up(x)))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, ROWS, bias=False)

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.table(ids)
            for block in self.blocks:
                x = block(x)
            logits = self.head(x)
            return nn.functional.cross_entropy(logits.view(-1, ROWS), labels.view(-1))

    del torch
    return Decoder()


def batch() -> dict[str, Any]:
    import torch

    ids = torch.zeros(2, 32, dtype=torch.long)
    return {"ids": ids, "labels": ids}


@needs_torch
def test_a_module_of_one_s_own() -> None:
    module = own_model()
    model = memplan.trace(module, batch(), name="mine")
    assert model.num_params == sum(each.numel() for each in module.parameters())
    assert model.num_layers == 3
    peaks = [
        memplan.estimate(
            model, memplan.TrainingSetup(precision="bf16", seq_len=64, **fields)
        ).peak_bytes
        for fields in (
            {},
            {"micro_batch_size": 8},
            {"micro_batch_size": 8, "checkpointing": "full"},
        )
    ]
    assert peaks[0] < peaks[2] < peaks[1]
    # Logits and their gradient alone, in 16 bits and their log-softmax.
    assert peaks[1] - peaks[0] > 7 * 64 * ROWS * 2 * 2


@needs_torch
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_files_are_what_is_traced(checkout: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=256,
        n_head=4,
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    ids = torch.zeros(2, 64, dtype=torch.long)
    traced = memplan.trace(GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids})
    file = memplan.load_model(checkout / "tests" / "data" / "traced" / "gpt2.tape.json")
    assert traced.traced is not None
    assert file.traced is not None
    setup = memplan.TrainingSetup(precision="bf16", seq_len=128)
    peaks = {memplan.estimate(each, setup, gpu="h100").peak_bytes for each in (traced, file)}
    assert len(peaks) == 1


@needs_torch
def test_arguments_in_order() -> None:
    named, ordered = (
        memplan.trace(own_model(), batch()),
        memplan.trace(own_model(), list(batch().values())),
    )
    assert named.traced == ordered.traced


@needs_torch
def test_what_hangs_on_sizes_is_refused() -> None:
    from torch import nn

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH)

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.table(ids)
            for _ in range(labels.shape[0]):
                x = nn.functional.relu(x)
            return x.mean()

    with pytest.raises(TraceError, match=r"for one batch and .* for another"):
        memplan.trace(Odd(), batch())


@needs_torch
def test_a_module_without_a_loss_is_refused() -> None:
    from torch import nn

    with pytest.raises(TraceError, match="returns no loss"):
        memplan.trace(nn.Linear(32, 4), {"input": __import__("torch").zeros(2, 32)})


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
def test_without_torch_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"pip install 'memplan\[verify\]'"):
        memplan.trace(object(), {})
