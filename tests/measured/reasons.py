"""Why allocated figures are off by more than the tests allow: pattern of records -> what the run did."""

LITGPT_ADAPTERS = (
    "LitGPT's adapters lie on one matrix for q, k and v, and index_copy keeps their output (lora.py, "
    "zero_pad); 4 % of the rest is between torch 2.1 and today's, by a run of its code"
)
REASONS: tuple[tuple[str, str], ...] = (
    (r"litgpt-llama2-7b-None-mb2", LITGPT_ADAPTERS),
    (r"litgpt-.*-bnb\.nf4(-dq)?-mb1", LITGPT_ADAPTERS),
    (
        r"litgpt-stablelm-mixed",
        "LitGPT's head runs in pieces of 128 tokens, each of which keeps a cast copy of its weight",
    ),
)

WRONG_VERDICTS: dict[str, str] = {
    "tune-31-405b-qlora": (
        "torchtune packs each tensor to torchao's NF4 as it loads, and its scales are sharded with the codes; a "
        "setup can say bitsandbytes alone, whose packed model lies whole on the card before it is sharded and "
        "whose scales stay so (220 GiB and 23 GiB)"
    ),
    "fsdpqlora-4090-7b-q-off-bs12": (
        "it reserved 22.4 GiB where 24.0 are said to be required: FSDP1 with offloaded shards, of torch 2.2, keeps less "
        "beside the peak than today's"
    ),
    "fsdpqlora-3090-yi-34b-bs2": (
        "it reserved 23.05 GiB of the card's 23.69, which leaves 0.64 for context and NCCL: two cards without NVLink "
        "have fewer channels than the range's low end (0.25 and 0.5) is of; required is 0.2 % more than it reserved"
    ),
    "fsdpqlora-3090-yi-34b-off-bs4": (
        "the same: 22.98 GiB reserved leave 0.71; required is 0.8 % more than it reserved"
    ),
}
"""Of each published run that was judged wrongly, what may have made the difference."""
