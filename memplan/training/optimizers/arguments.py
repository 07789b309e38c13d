"""``rank=64,beta1=0.9``: an optimizer's settings in one text, as ``TrainingArguments.optim_args`` has them."""


def parse_arguments(text: str) -> dict[str, object]:
    """Settings by name, numbers and flags as what they say; parts of one value are joined by ``+``.

    Raises ``ValueError`` for a part that is no ``key=value``.

    >>> parse_arguments("rank=64, scale=0.25, proj_type=std, target_modules=attn+mlp")
    {'rank': 64, 'scale': 0.25, 'proj_type': 'std', 'target_modules': 'attn,mlp'}
    """
    found: dict[str, object] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key or not value:
            msg = f"write key=value,key=value, not {text[:60]!r}"
            raise ValueError(msg)
        found[key.strip()] = parsed(value.strip())
    return found


def parsed(value: str) -> bool | int | float | str:
    """A number or a flag where the text is one."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        return value.replace("+", ",")
