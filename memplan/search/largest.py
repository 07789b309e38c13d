"""The largest value of one thing with which a setup fits a card: what ``max`` stands for.

Plans look for the same of every setup that they try; here everything else is given.
"""

from collections.abc import Callable
from functools import cache

from memplan.errors import SetupError
from memplan.estimator import Estimate, estimate
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.config import MAX_LAYERS
from memplan.model.spec import ModelSpec
from memplan.search.batch import MAX_MICRO_BATCH, SizeSearch
from memplan.search.depth import with_layers
from memplan.search.grid import with_global_batch
from memplan.search.quantity import Quantity
from memplan.training.adapters import Lora
from memplan.training.setup import TrainingSetup

MAX_SEQ_LEN = 2**24
"""Beyond which nobody looks [tokens]."""


def largest(
    model: ModelSpec,
    setup: TrainingSetup,
    gpu: GpuSpec,
    quantity: Quantity,
    *,
    global_batch_size: int | None = None,
) -> Estimate | None:
    """The estimate of the largest value with which the setup fits; None: not even the least does.

    Sequences that ranks share grow by what can be shared; with a global batch micro-batches are such as make it up. The
    step above was seen not to fit, or is beyond what there is. Raises ``SetupError`` for a setup that
    cannot be trained, and for a rank where there is no LoRA.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> from memplan.sources.models import load_model
    >>> setup = TrainingSetup(seq_len=512, checkpointing="full")
    >>> found = largest(load_model("gpt2"), setup, load_gpu("v100-16gb"), Quantity.MICRO_BATCH)
    >>> found.setup.micro_batch_size
    35
    """
    if quantity is Quantity.MICRO_BATCH and global_batch_size is not None:
        return _largest_divisor(model, setup, gpu, global_batch_size)
    step = shared_by(setup) if quantity is Quantity.SEQ_LEN else 1
    asked = _asking(model, setup, gpu, quantity)

    @cache
    def ask(size: int) -> Estimate:
        return asked(size * step)

    search = SizeSearch(
        ask,
        gpu.capacity_bytes,
        looks_beyond=quantity is Quantity.SEQ_LEN,
        grows_activations=quantity in (Quantity.MICRO_BATCH, Quantity.SEQ_LEN),
    )
    limit = most(model, quantity) // step
    likely = _likely(model, setup, quantity) // step
    best = search.run(first=min(max(1, likely), limit), limit=limit)
    return ask(best) if best else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A setup with the largest value that fits a card."""

    model: ModelSpec
    setup: TrainingSetup
    size: int
    """The value; the least there is where none fits."""
    next_size: int | None
    """The next one, which does not fit; None: beyond what there is."""
    fits: bool


def largest_setup(
    model: ModelSpec,
    setup: TrainingSetup,
    gpu: GpuSpec,
    quantity: Quantity,
    *,
    global_batch_size: int | None = None,
) -> Found:
    """The setup with the largest value that fits, in the words that it was given in.

    Raises as ``largest`` does.
    """
    answer = largest(model, setup, gpu, quantity, global_batch_size=global_batch_size)
    step = shared_by(setup) if quantity is Quantity.SEQ_LEN else 1
    size = step if answer is None else size_of(answer, quantity)
    larger = size + step if size + step <= most(model, quantity) else None
    if quantity is Quantity.LAYERS:
        changed, made = setup, with_layers(model, size)
    else:
        changed, made = with_size(setup, quantity, size), model
    if quantity is Quantity.MICRO_BATCH and global_batch_size is not None:
        changed = with_global_batch(changed, global_batch_size)
        larger = _next_divisor(size, size * changed.gradient_accumulation_steps)
    return Found(
        model=made,
        setup=changed,
        size=size,
        next_size=larger,
        fits=answer is not None,
    )


def _asking(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec, quantity: Quantity
) -> Callable[[int], Estimate]:
    """The estimate of one value."""
    if quantity is Quantity.LAYERS:
        return lambda size: estimate(with_layers(model, size), setup, gpu)
    return lambda size: estimate(model, with_size(setup, quantity, size), gpu)


def with_size(setup: TrainingSetup, quantity: Quantity, size: int) -> TrainingSetup:
    """The setup with one value of its own changed.

    Raises ``SetupError`` for a rank where there is no LoRA, and for a value that cannot be.

    >>> with_size(TrainingSetup(adapter=Lora(rank=8)), Quantity.RANK, 64).adapter.rank
    64
    """
    if quantity is Quantity.MICRO_BATCH:
        return replace(setup, micro_batch_size=size)
    if quantity is Quantity.SEQ_LEN:
        return replace(setup, seq_len=size)
    assert quantity is Quantity.RANK, "layers are the model's"
    if not isinstance(setup.adapter, Lora):
        msg = "adapter: there is no LoRA whose rank could be looked for: name one"
        raise SetupError(msg)
    return replace(setup, adapter=replace(setup.adapter, rank=size))


def most(model: ModelSpec, quantity: Quantity) -> int:
    """The largest value to look at.

    Sequences end where a model's positions do; an adapter of as many columns as the model is wide is low-rank no more.
    """
    stack = model.stacks[0] if model.stacks else None
    if quantity is Quantity.SEQ_LEN:
        embedding = stack.embedding if stack is not None else None
        positions = embedding.num_positions if embedding is not None else 0
        return model.context_length if positions else MAX_SEQ_LEN
    if quantity is Quantity.RANK:
        return model.hidden_size
    return MAX_LAYERS if quantity is Quantity.LAYERS else MAX_MICRO_BATCH


def size_of(answer: Estimate, quantity: Quantity) -> int:
    """The value that an answer is of."""
    setup = answer.setup
    if quantity is Quantity.RANK:
        assert isinstance(setup.adapter, Lora), "it was looked for"
        return setup.adapter.rank
    if quantity is Quantity.LAYERS:
        return answer.model.stacks[0].num_layers
    return setup.micro_batch_size if quantity is Quantity.MICRO_BATCH else setup.seq_len or 0


def _likely(model: ModelSpec, setup: TrainingSetup, quantity: Quantity) -> int:
    """Where to look first."""
    if quantity is Quantity.SEQ_LEN:
        return setup.resolve(model.context_length).seq_len or 1
    return {Quantity.RANK: 16, Quantity.LAYERS: model.num_layers}.get(quantity, 1)


def shared_by(setup: TrainingSetup) -> int:
    """What a sequence's tokens have to be a multiple of, so that ranks can share them.

    A ring takes two pieces of each rank's (torch's ``context_parallel``), and split layers share a rank's piece.
    """
    pieces = 2 * setup.context_parallel if setup.context_parallel > 1 else 1
    return pieces * (setup.tensor_parallel if setup.sequence_parallel else 1)


def _next_divisor(size: int, total: int) -> int | None:
    """The next larger of a number's divisors.

    >>> _next_divisor(4, 12), _next_divisor(12, 12)
    (6, None)
    """
    return next((each for each in range(size + 1, total + 1) if total % each == 0), None)


def _largest_divisor(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec, global_batch_size: int
) -> Estimate | None:
    """The largest micro-batch that fits of those that make up the global batch."""
    each = with_global_batch(replace(setup, micro_batch_size=1), global_batch_size)
    share = each.gradient_accumulation_steps
    for size in range(share, 0, -1):
        if share % size:
            continue
        cut = with_global_batch(replace(setup, micro_batch_size=size), global_batch_size)
        answer = estimate(model, cut, gpu)
        if not answer.unmodelled and answer.fits_within(gpu.capacity_bytes):
            return answer
    return None
