"""How long what runs beside a training step takes: other models' passes, generating completions, handing weights over.

Other models (a reference, a teacher, PPO's critic and reward model) and passes of the trained one without gradients are read off
their own tapes, as the trained model is.

Completions are generated prompt first, then token after token. A token of all sequences at once takes what its kernels do, which read
every weight once, and the reading of the keys and values so far: at half of the completion's length on the average. transformers'
``generate`` asks for each of these kernels in Python, which takes the host longer than the GPU (``memplan.compute.host``); vLLM and SGLang
fuse what stands between two products and replay CUDA graphs, and run as many sequences at once as their share of the card has room for [1]_. Where weights do not fit into that
share, as few GPUs as do hold them together and send one another two sums a layer. All completions are taken to be as long as the
longest, which decides when the step begins; the low end of the range is half of that. Where the longest is named apart
(``Job.longest_completion``), a batch shrinks on the way to it.

References
----------
.. [1] W. Kwon et al., "Efficient memory management for large language model serving with PagedAttention," SOSP 2023, arXiv:2309.06180:
   decoding is bound by memory, keys and values decide how many sequences run together.
"""

from collections.abc import Iterator

from memplan.compute.links import collective_seconds
from memplan.compute.rates import UPDATE_SHARE, Rates
from memplan.compute.roofline import VIEWS, segment_work
from memplan.compute.side_pass import GENERATION, HANDING_OVER, OTHERS, SidePass, SidePasses
from memplan.compute.traffic import fused_bytes, kernels_of
from memplan.dtypes import DType
from memplan.estimator.job import Job
from memplan.estimator.others import cache_bytes, generation, left_bytes
from memplan.estimator.recording import completion_length
from memplan.graph.core.operation_kinds import EXTERN_KERNELS
from memplan.graph.counts import total_parameters
from memplan.hardware.network import Network
from memplan.memory.beside import SideModel, When
from memplan.memory.programs.others import shards_frozen_models
from memplan.training.jobs import COLOCATED, Rollout
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.exchange import ExchangeKind, Ranks

HALF = DType.BF16
"""What engines serve in."""
ENGINE_STEP_S = 2e-3
"""What an engine takes for each token of a batch beside its GPU: scheduling, taking tokens, making them ready. Of vLLM 0.5.3's time on an H100
with Llama 3 8B 29 % went there and 38 % to the GPU (blog.vllm.ai, 2024-09-05); of 0.6's, half as much, by its own nightly latency of that model
on an H200: 6.5 ms a token, of which weights and kernels take 4.5 (buildkite.com/vllm/performance-benchmark, build 9515)."""
SERVER_SHARE = 0.9
"""Of its cards, what a server takes (vLLM, ``gpu_memory_utilization``)."""
UPDATE_BYTES = 28
"""Of each fp32 master, what AdamW reads and writes."""
SUMS_OF_A_LAYER = 2


def side_passes(job: Job, network: Network, rates: Rates) -> SidePasses:
    """All that runs beside the trained model's own passes, but for evaluation."""
    reader = _Reader(job, network, rates)
    models = job.given.beside.models
    whole = [
        reader.scored(each)
        for each in models
        if each.when is When.ROLLOUT and not _is_generation(each)
    ]
    whole += [reader.trained(each) for each in models if each.is_trained]
    inner = [reader.passed(each) for each in models if each.when in (When.FIRST, When.JOINED)]
    if job.setup.job.generates:
        whole = [*reader.generated(), *reader.handed_over(), *whole]
    return SidePasses(tuple(whole), tuple(inner))


def generation_seconds(job: Job, network: Network, rates: Rates) -> float:
    """All completions of a step, their prompts read [s]."""
    return sum(each.device_s + each.sent_s for each in _Reader(job, network, rates).generated())


def _is_generation(side: SideModel) -> bool:
    return bool(side.kept_bytes)


class _Reader:
    """Reads the tapes of one job."""

    def __init__(self, job: Job, network: Network, rates: Rates) -> None:
        self.job = job
        self.setup = job.setup
        self.network = network
        self.rates = rates
        self.rows = self.setup.micro_batch_size * self.setup.gradient_accumulation_steps
        """Sequences of a rank in a step."""
        self.weights_bytes = total_parameters(job.walked.tape) * HALF.num_bytes

    def _forward(self, side: SideModel) -> tuple[float, float]:
        """On the GPU, and for the host to ask for it [s]."""
        work = segment_work(side.tape, self.job.walked.model, self.rates)
        device = asked = 0.0
        for each in side.passes.forward:
            own = work[each.segment.index].forward
            device += each.repeats * own.device_s
            asked += each.repeats * own.host_s
        return device, asked

    def _replayed(self, side: SideModel) -> float:
        """On the GPU, where what stands between two products is one kernel, and a graph launches all of them [s]."""
        work = segment_work(side.tape, self.job.walked.model, self.rates)
        found = 0.0
        for each in side.passes.forward:
            own = work[each.segment.index].forward
            device = own.products_s + own.attention_s
            for kernel in kernels_of(each.segment.operations):
                if kernel[0].kind not in EXTERN_KERNELS and any(
                    op.kind not in VIEWS for op in kernel
                ):
                    device += fused_bytes(kernel) / self.rates.bytes_per_s + self.rates.kernel_s
            found += each.repeats * device
        return found

    def passed(self, side: SideModel, times: float = 1.0) -> SidePass:
        """Forward passes; a sharded model is gathered ahead of its layers."""
        device, asked = self._forward(side)
        ahead = self._gathered(side) if side.is_sharded and side.owns_weights else 0.0
        return SidePass(OTHERS, times * device, times * asked, ahead_s=times * ahead)

    def scored(self, side: SideModel) -> SidePass:
        """Every sequence of a step, as many at once as are scored together."""
        return self.passed(side, self.rows / side.setup.micro_batch_size)

    def trained(self, side: SideModel) -> SidePass:
        """A critic: its micro-batches, forward and backward, then its update."""
        work = segment_work(side.tape, self.job.walked.model, self.rates)
        times = self.rows / side.setup.micro_batch_size
        device, asked = self._forward(side)
        for each in side.passes.backward:
            own = work[each.segment.index]
            device += each.repeats * (own.backward.device_s + own.again.device_s)
            asked += each.repeats * (own.backward.host_s + own.again.host_s)
        ranks = self.setup.gradient_ranks
        numel = total_parameters(side.tape) / (ranks if side.is_sharded else 1)
        update = UPDATE_BYTES * numel / (UPDATE_SHARE * self.rates.bytes_per_s)
        gathers = (
            3 * times if side.is_sharded else 2.0
        )  # two gathers and a scatter, or one all-reduce
        sent = gathers * self._gathered(side)
        return SidePass(OTHERS, times * device + update, times * asked, ahead_s=sent)

    def _gathered(self, side: SideModel) -> float:
        size = total_parameters(side.tape) * side.tape.options.compute.num_bytes
        return self._all_gather(size)

    def _all_gather(self, num_bytes: float) -> float:
        ranks = Ranks(self.setup.gradient_ranks)
        return collective_seconds(ExchangeKind.ALL_GATHER, num_bytes, ranks, self.network)

    # -- completions -----------------------------------------------------------------------------

    def generated(self) -> Iterator[SidePass]:
        """The prompts at once, then token after token."""
        kind = self.setup.job.chosen_rollout
        if kind is Rollout.NONE:
            return
        rows = self.setup.job.rollout_batch_size or self.rows
        tokens = completion_length(self.setup)
        if kind is Rollout.HF:
            yield self._decoded(rows, tokens, self.rows / rows, is_asked=True)
            return
        degree = self._degree()
        at_once = max(1, min(self.rows * degree, self._room(degree)))
        yield self._decoded(at_once, tokens, self.rows * degree / at_once, degree=degree)

    def _decoded(
        self, rows: int, tokens: int, times: float, *, degree: int = 1, is_asked: bool = False
    ) -> SidePass:
        """So many sequences at once, so often, on ``degree`` GPUs together."""
        model, setup = self.job.walked.model, self.setup
        served = None if is_asked else HALF
        prompt, token = generation(self.job.walked, setup, self.job.gpu, rows, served)
        first_s, first_asked_s = self._forward(prompt)
        longest = max(tokens, setup.job.longest_completion or tokens)
        held = (setup.seq_len or 1) - tokens // 2
        read_s = cache_bytes(model, rows, held, HALF) / self.rates.bytes_per_s
        if is_asked:
            each_s, each_asked_s = self._forward(token)
            tokens_s, asked = longest * each_s, first_asked_s + longest * each_asked_s
        else:
            tokens_s, asked = self._tokens_s(token, tokens, longest), 0.0
        device = (first_s + tokens_s + tokens * read_s) / degree
        device += 0.0 if is_asked else longest * ENGINE_STEP_S
        size = rows * model.hidden_size * HALF.num_bytes
        sums = SUMS_OF_A_LAYER * model.num_layers * longest
        sent = sums * collective_seconds(ExchangeKind.ALL_REDUCE, size, Ranks(degree), self.network)
        return SidePass(
            GENERATION, times * device, times * asked, times * sent, is_shorter=True
        )  # fmt: skip

    def _tokens_s(self, token: SideModel, tokens: int, longest: int) -> float:
        """Token after token of a batch until the longest completion is there [s].

        A step takes what one sequence does, and more by how many still run, who are ``tokens / longest`` of all on average.
        """
        each_s = self._replayed(token)
        if longest == tokens:
            return tokens * each_s
        alone = generation(self.job.walked, self.setup, self.job.gpu, 1, HALF)[1]
        alone_s = self._replayed(alone)
        return longest * alone_s + tokens * max(0.0, each_s - alone_s)

    @property
    def _share_bytes(self) -> int | None:
        """Of a card, what the engine has; None: nobody says which card."""
        gpu, job = self.job.gpu, self.setup.job
        share = job.rollout_share if job.chosen_rollout in COLOCATED else SERVER_SHARE
        return None if gpu is None else int(share * gpu.capacity_bytes)

    def _degree(self) -> int:
        """GPUs that hold the weights together, with as much again for keys and values."""
        share = self._share_bytes
        if share is None:
            return 1
        found = 1
        while 2 * self.weights_bytes > found * share and found < self.setup.gpus_per_node:
            found *= 2
        return found

    def _room(self, degree: int) -> int:
        """Sequences whose keys and values fit beside the weights."""
        share = self._share_bytes
        if share is None:
            return self.rows * degree
        each = cache_bytes(self.job.walked.model, 1, self.setup.seq_len or 1, HALF)
        return int((degree * share - self.weights_bytes) // max(each, 1))

    def handed_over(self) -> Iterator[SidePass]:
        """New weights on their way to who generates, and what makes room for it."""
        job, kind = self.setup.job, self.setup.job.chosen_rollout
        if kind is Rollout.NONE:
            return
        sent = copied = host = 0.0
        if _shards_weights(self.setup):
            sent = self._all_gather(self.weights_bytes)
        if kind is not Rollout.HF:
            copied = 2 * self.weights_bytes / self._degree() / self.rates.bytes_per_s
        if kind is Rollout.SERVER:
            sent += self.weights_bytes / self.network.between_nodes
        if job.sleep == 1:
            host = 2 * self.weights_bytes / self._degree() / self.network.to_host
        host += 2 * left_bytes(self.job.walked.tape, self.setup) / self.network.to_host
        if sent or copied or host:
            yield SidePass(HANDING_OVER, copied, sent_s=sent, host_s=host)


def _shards_weights(setup: TrainingSetup) -> bool:
    return shards_frozen_models(setup.chosen_engine, setup.zero_stage, setup.gradient_ranks)
