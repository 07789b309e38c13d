"""One setup's account: components by phase, the host's memory, what lies beside the allocator's bytes."""

from collections.abc import Sequence

from memplan.estimator import Estimate, Verdict
from memplan.memory.account import ComponentKind
from memplan.memory.replaying.replay import MAX_CYCLES
from memplan.memory.runtime import ByteRange
from memplan.report.estimates.changes import setup_label
from memplan.report.estimates.columns import plain_gib
from memplan.report.terminal.blocks import Column
from memplan.training.choices import Offload
from memplan.units import GIB, MIB

MOST_NAMED = 4
"""Ranges of one run."""

LEAST_ISLAND_BYTES = 16 * MIB
"""Narrower ones show as a single figure."""


def reserved_lines(answer: Estimate, card: str) -> list[str]:
    """What is reserved on a card with room; what is needed of it, and with what less it lives by luck."""
    if answer.certain_bytes is not None:
        return []
    run, beside = answer.run, answer.overhead_bytes
    reserved, least = plain_gib(answer.reserved_bytes), plain_gib(run.required_bytes)
    but = _named(run.gaps(), narrowest_bytes=0)
    enough = f"{least} GiB for segments are enough, and all that is more"
    lines = [
        f"On {card}, {reserved} GiB are reserved; {enough}" + (f" but {but} GiB" if but else "")
    ]
    found = _named(run.islands(), narrowest_bytes=LEAST_ISLAND_BYTES)
    if found:
        lines.append(
            f"It would live by luck with {found} GiB for segments too, not with all that lies between; "
            f"beside them {plain_gib(beside.low)}-{plain_gib(beside.high)} GiB"
        )
    if not run.is_settled:
        lines.append(
            f"Steps were not all alike after {MAX_CYCLES} more: with just what is needed a later one may do otherwise"
        )
    return lines


def _named(ranges: Sequence[tuple[int, int]], *, narrowest_bytes: int) -> str:
    """The first of some ranges of capacities, and how many there are besides."""
    wide = [(start, end) for start, end in ranges if end - start >= narrowest_bytes]
    named = ", ".join(f"{plain_gib(start)}-{plain_gib(end)}" for start, end in wide[:MOST_NAMED])
    more = len(wide) - MOST_NAMED
    return named + (f" and {more} more" if more > 0 else "")


def host_lines(estimates: Sequence[Estimate]) -> list[str]:
    """CPU RAM of a node, when it is needed and what for; each line once."""
    lines = []
    for each in estimates:
        if not each.host_bytes:
            continue
        ranks = each.setup.gpus_per_node
        node = each.node_memory_bytes
        limit = f" of {node / GIB:,.1f} GiB ({each.host_verdict})" if node is not None else " GiB"
        moment, why = host_reason(each)
        shared = f", {ranks} ranks together" if ranks > 1 else ""
        lines.append(
            f"CPU RAM per node: {each.host_bytes / GIB:,.1f}{limit}{shared}, {moment}: {why}"
        )
    return list(dict.fromkeys(lines))


def beside_lines(estimates: Sequence[Estimate], *, named: bool = False) -> list[str]:
    """What of each card's needs is not allocated, figure by figure, and what all GPUs need; ``named``: with whose setup."""
    return list(
        dict.fromkeys(_beside_line(each, named=named) for each in estimates if each.gpu is not None)
    )


def _beside_line(each: Estimate, *, named: bool) -> str:
    assert each.gpu is not None
    parts = [f"CUDA context {_range_gib(each.context_bytes)}"]
    if each.nccl_bytes.high:
        parts.append(f"NCCL {_range_gib(each.nccl_bytes)}")
    parts.append(f"fragmentation {each.fragmentation_bytes / GIB:,.2f}")
    whose = f" with {setup_label(each.setup)}" if named else ""
    text = f"Of what {each.gpu.short_name} needs{whose}: {', '.join(parts)} GiB"
    if not named and each.setup.num_gpus > 1:
        together = _range_gib(each.all_gpus_bytes)
        text += f"; {each.setup.num_gpus} GPUs as full as this one: {together} GiB"
    return text


def _range_gib(found: ByteRange) -> str:
    return f"{found.low / GIB:,.1f}-{found.high / GIB:,.1f}"


def host_formulas(answer: Estimate) -> list[str]:
    """CPU RAM of a node when it loads, between steps and when it saves, with the arithmetic."""
    host, ranks = answer.account.host, answer.setup.gpus_per_node
    if not answer.host_bytes:
        return []
    own = host.save_bytes - (host.writer_bytes if answer.account.rank == 0 else 0)
    moments = (
        ("while loading", host.load_bytes, 0),
        ("between steps", host.held_bytes, 0),
        ("while saving", own, host.writer_bytes),
    )
    lines = [f"CPU RAM of a node: {answer.host_bytes / GIB:,.2f} GiB, the highest of"]
    for moment, each, writer in moments:
        total = ranks * each + writer
        if not total:
            continue
        terms = []
        if each:
            per_param = f"{each / answer.num_params:,.3g} B x {answer.num_params:,} parameters"
            terms.append(f"{ranks} ranks x {per_param}" if ranks > 1 else per_param)
        if writer:
            per_param = f"{writer / answer.num_params:,.3g} B x {answer.num_params:,}"
            terms.append(f"{per_param} on the rank that writes")
        lines.append(f"  {moment} {total / GIB:,.2f} GiB = {' + '.join(terms)}")
    if host.held_bytes:
        locked = ranks * host.pinned_bytes
        share = f"{host.pinned_bytes / host.held_bytes:.0%} of what is held between steps"
        lines.append(f"  page-locked (pin_memory) {locked / GIB:,.2f} GiB, {share}")
    return lines


WEIGHT_BYTES = (2, 4)
"""Of an element of a whole copy of the model, in 16 and 32 bit."""


def host_reason(answer: Estimate) -> tuple[str, str]:
    """When a node's CPU RAM is fullest, and with what."""
    host, setup, ranks = answer.account.host, answer.setup, answer.setup.gpus_per_node
    own = host.save_bytes - (host.writer_bytes if answer.account.rank == 0 else 0)
    fullest = max(ranks * host.held_bytes, ranks * own + host.writer_bytes)
    if ranks * host.load_bytes >= fullest:
        offloaded = " and ".join(
            name
            for name, place in (
                ("the optimizer", setup.offload_optimizer),
                ("the parameters", setup.offload_param),
            )
            if place is not Offload.NONE
        )
        if round(host.load_bytes / answer.num_params, 2) in WEIGHT_BYTES:
            copies = "each rank loads a copy of the model"
            return "while loading", copies if ranks > 1 else "the model"
        if offloaded:
            return "while setting up", f"{offloaded}, and copies that become page-locked"
        return "while loading", "the model, a part for each rank"
    if ranks * host.held_bytes >= fullest:
        return "between steps", "what is offloaded"
    beside = ", beside what is offloaded" if host.held_bytes else ""
    return "while saving", f"a checkpoint{beside}"


def deciding_text(answer: Estimate) -> str:
    """``load 87.0``, in GiB, where loading or saving decides the verdict; else nothing."""
    if answer.worst_bytes == answer.peak_bytes or answer.verdict is Verdict.FITS:
        return ""
    return f"{answer.deciding_phase} {answer.worst_bytes / GIB:,.1f}"


TOLD_BYTES = GIB // 200
"""Buffers of less are no row of an account: it would be zeros."""


def account_columns(estimate: Estimate, names: str = "") -> list[Column]:
    """Components down, phases across, each phase at its own peak; ``names``: of which GPUs."""
    phases = list(estimate.phases.values())
    most = {
        kind: max((phase.components.get(kind.label, 0) for phase in phases), default=0)
        for kind in ComponentKind
        if any(kind.label in phase.components for phase in phases)
    }
    kinds = [
        kind
        for kind, size in most.items()
        if kind is not ComponentKind.BUFFERS or size >= TOLD_BYTES
    ]
    labels = [kind.label.replace("_", " ") for kind in kinds]
    styles = ("",) * len(kinds) + ("bold",)
    columns = [
        Column(
            header=(f"GiB, {names}" if names else "GiB",), cells=(*labels, "peak"), styles=styles
        )
    ]
    for phase in phases:
        sizes = [phase.components.get(kind.label, 0) for kind in kinds]
        mark = " *" if phase.name == estimate.deciding_phase else ""
        columns.append(
            Column(
                header=(phase.name + mark,),
                cells=(
                    *(plain_gib(size) if size else "" for size in sizes),
                    plain_gib(phase.peak_bytes),
                ),
                styles=styles,
                is_figure=True,
            )
        )
    return columns
