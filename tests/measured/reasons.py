"""Why allocated figures are off by more than the tests allow: pattern of records -> what the run did."""

REASONS: tuple[tuple[str, str], ...] = (
    (
        r"fms-base-santacoder-(g1-b8|g2-b4)-none-full",
        "GPT-BigCode of transformers 4.48 keeps its cache under checkpointing, to the end of forward",
    ),
    (
        r"litgpt-llama2-7b-None-mb2",
        "LitGPT's adapters lie on one matrix for q, k and v and keep their padded output; torch 2.1",
    ),
    (r"fsdpqlora-.*|fms-.*-g2-.*-none-lora", "adapters under FSDP1 are not counted yet"),
)
