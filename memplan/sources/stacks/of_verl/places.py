"""Where things stand in verl's files, and the numbers that several parts of their reader ask for."""

from memplan.sources.stacks.common.found import Found
from memplan.sources.stacks.common.keys import Keys

ACTOR = "actor_rollout_ref.actor"
FSDP = "actor_rollout_ref.actor.fsdp_config"
MEGATRON = "actor_rollout_ref.actor.megatron"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
REWARD = "reward.reward_model"
DTYPES = {
    "fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16",
}  # fmt: skip


def number(found: Found, field: str) -> int:
    """A whole number that was found; 1 where none was."""
    value = found.fields.get(field, 1)
    assert isinstance(value, int)
    return value


def ranks_of_one(found: Found) -> int:
    """Ranks that have one sequence between them: those that split its tokens, its layers, or what is in a layer."""
    tensor, pipeline = number(found, "tensor_parallel"), number(found, "pipeline_parallel")
    return tensor * pipeline * number(found, "context_parallel")


def micro_batch(keys: Keys, found: Found, key: str, older: str) -> int | None:
    """Sequences of a micro-batch on one rank; the older key has those of all ranks."""
    own, of_all = keys.count(key), keys.take(older)
    if own is None and isinstance(of_all, int) and of_all > 0:
        ranks = number(found, "num_gpus") // ranks_of_one(found)
        own = max(1, of_all // max(1, ranks))
    return own


def generated(keys: Keys, found: Found, shared_by: int) -> int:
    """The same of all that one round of generation hands over, which is scored before the first step; 0: not said."""
    return shared(keys, found, "data.train_batch_size", shared_by)


def mini_batch(keys: Keys, found: Found, shared_by: int) -> int:
    """Sequences that a group of ranks, which share each of them, has in one mini-batch, which is one step."""
    return shared(keys, found, f"{ACTOR}.ppo_mini_batch_size", shared_by)


def shared(keys: Keys, found: Found, key: str, shared_by: int) -> int:
    """Answers to the prompts that a key counts, for each group of ranks that has one sequence between them."""
    prompts = keys.take(key)
    answers = 1 if keys.has("sft") else keys.count(f"{ROLLOUT}.n") or 1
    groups = max(1, number(found, "num_gpus") // shared_by)
    return (prompts if isinstance(prompts, int) else 0) * answers // groups
