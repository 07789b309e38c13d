"""GPUs as data: what a card can hold and do."""
