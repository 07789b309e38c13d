"""A platform's pools, in YAML.

``configs/pools/platform.yaml`` is an example to copy: a list under ``pools``, of each

==============  ============================================================================
name            what answers call it
gpu             its cards: a name of ``memplan gpus``, 46GiB, or a file of one card
count           how many it has
quota           the most that one job may have; by default all
gpus_per_node   by default 8
price           of one GPU's hour, in whatever money
cpu_memory      of a node, such as 1TiB
scheduler       slurm, kubernetes, kueue, skypilot or ray: which file asks for it
queue           what the scheduler calls it: a partition, a local queue
==============  ============================================================================
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from memplan.errors import ConfigError, MemplanError, UsageError, did_you_mean
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.pool import USUAL_GPUS_PER_NODE, Pool
from memplan.text import shortened, shown

KEYS = (
    "name", "gpu", "count", "quota", "gpus_per_node", "price", "cpu_memory", "scheduler", "queue",
)  # fmt: skip
MAX_GPUS = 10_000_000
"""More is a slip of the keyboard."""
MAX_NAME = 100
"""Characters of a name."""
PLAIN = frozenset("-_.")
"""What a queue's name has besides letters and digits: it is written into scripts."""


def read_pools(path: str | Path) -> tuple[Pool, ...]:
    """The pools of a file, in its order.

    Raises ``ConfigError`` for a file that cannot be read, for keys that there are not, and for numbers that no
    pool has, each named with its place.
    """
    from memplan.sources.files import read_mapping

    return pools_from(read_mapping(path), source=str(path))


def chosen_pools(name: str | None) -> str | Path:
    """The file that a name stands for: a path, or pools of the user's own configuration."""
    from memplan.sources.cards.organisation import pools_file

    own = None if name is not None and Path(name).is_file() else pools_file(name)
    return own or name or ""


def pools_from(values: Mapping[str, object], *, source: str) -> tuple[Pool, ...]:
    """The same of what was read already; ``source`` names it in errors.

    >>> (pool,) = pools_from({"pools": [{"name": "dev", "gpu": "t4", "count": 4}]}, source="pools.yaml")
    >>> pool.name, pool.gpu.gpu_id, pool.usable_gpus
    ('dev', 't4-16gb', 4)
    """
    for key in values:
        if key != "pools":
            msg = f"{source}: unknown key {shown(key)}: a file of pools has a list under `pools`"
            raise ConfigError(msg)
    listed = values.get("pools")
    if not isinstance(listed, list) or not listed:
        msg = f"{source}: pools: write a list of at least one pool"
        raise ConfigError(msg)
    found = tuple(
        _pool(each, f"{source}: pool {number}") for number, each in enumerate(listed, start=1)
    )
    _refuse_twice((each.name for each in found), source)
    return found


def _refuse_twice(names: Iterable[str], source: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            msg = f"{source}: the pool {shown(name)} is there twice"
            raise ConfigError(msg)
        seen.add(name)


def _pool(values: object, where: str) -> Pool:
    if not isinstance(values, Mapping):
        msg = f"{where}: write its keys ({', '.join(KEYS)}), not {shown(values)}"
        raise ConfigError(msg)
    for key in values:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS) or f" Known: {', '.join(KEYS)}"
            msg = f"{where}: unknown key {shown(key)}.{hint}"
            raise ConfigError(msg)
    name = _text(values, "name", where)
    if not name:
        msg = f"{where}: name is missing"
        raise ConfigError(msg)
    where = f"{where} ({shortened(name, MAX_NAME)})"
    count = _count(values, "count", where)
    if count is None:
        msg = f"{where}: count is missing: how many GPUs it has"
        raise ConfigError(msg)
    return Pool(
        name=shortened(name, MAX_NAME),
        gpu=_gpu(values, where),
        num_gpus=count,
        gpus_per_node=_count(values, "gpus_per_node", where) or USUAL_GPUS_PER_NODE,
        quota=_count(values, "quota", where),
        price=_price(values, where),
        node_memory_bytes=_memory(values, where),
        scheduler=_scheduler(values, where),
        queue=_queue(values, where),
    )


def _text(values: Mapping[str, object], key: str, where: str) -> str:
    value = values.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        msg = f"{where}: {key}: write a text, not {shown(value)}"
        raise ConfigError(msg)
    return " ".join(str(value).split())


def _count(values: Mapping[str, object], key: str, where: str) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_GPUS:
        msg = f"{where}: {key}: write a whole number from 1 on, not {shown(value)}"
        raise ConfigError(msg)
    return value


def _price(values: Mapping[str, object], where: str) -> float | None:
    value = values.get("price")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        msg = f"{where}: price: write what one GPU costs in an hour, not {shown(value)}"
        raise ConfigError(msg)
    return float(value)


def _memory(values: Mapping[str, object], where: str) -> int | None:
    from memplan.units import parse_bytes

    text = _text(values, "cpu_memory", where)
    if not text:
        return None
    try:
        return parse_bytes(text)
    except UsageError as error:
        msg = f"{where}: cpu_memory: {shortened(str(error), 300)}"
        raise ConfigError(msg) from None


def _gpu(values: Mapping[str, object], where: str) -> GpuSpec:
    from memplan.sources.gpus import load_gpu

    name = _text(values, "gpu", where)
    if not name:
        msg = f"{where}: gpu is missing: a name that `memplan gpus` lists"
        raise ConfigError(msg)
    try:
        return load_gpu(name)
    except MemplanError as error:
        msg = f"{where}: gpu: {error}"
        raise ConfigError(msg) from None


def _scheduler(values: Mapping[str, object], where: str) -> str:
    from memplan.sources.requests import Scheduler

    known = tuple(each.value for each in Scheduler)
    word = _text(values, "scheduler", where)
    if word and word not in known:
        hint = did_you_mean(word, known) or f" There are: {', '.join(known)}"
        msg = f"{where}: scheduler: {shown(word)} is none.{hint}"
        raise ConfigError(msg)
    return word


def _queue(values: Mapping[str, object], where: str) -> str:
    word = _text(values, "queue", where)
    if not all(each.isascii() and (each.isalnum() or each in PLAIN) for each in word):
        msg = f"{where}: queue: {shown(word)} has other characters than letters, digits, - _ and ."
        raise ConfigError(msg)
    if len(word) > MAX_NAME:
        msg = f"{where}: queue: is longer than {MAX_NAME} characters"
        raise ConfigError(msg)
    return word
