"""Ranks: real processes that train together give the bits of DistributedDataParallel, whatever the plan.

Two ranks add up two numbers, which commutes, so that nothing has to be allowed for.  With several micro-batches, and
with a limited norm of parts, the reference is the loop that ``tests/runtime/ranks/beside_ddp.py`` writes out by hand.
Three ranks and more add up in the order of their numbers, DDP in a ring's: one step is compared with the mean in
float64, within the rounding of its sums, and all steps have the same bits on all ranks and under another plan: of the
same layout with any knobs, and in every mode and layout with one micro-batch and no limit of the norm (with several,
gradients that leave round in each, and a norm of parts is taken in float64).
Two shard groups of two ranks are laid beside a loop that adds up within groups and then over them
(``tests/runtime/ranks/beside_groups.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protwin.shared.basics.progress import OnProgress
from protwin.shared.basics.units import format_bytes
from protwin.shared.schema.plan import ActivationMode, ParallelMode, Plan
from tests.runtime.accounts import BAR
from tests.runtime.equality import different
from tests.runtime.ranks.beside_ddp import Found, all_cases, has_parts, train
from tests.runtime.ranks.beside_groups import train_grouped
from tests.runtime.ranks.measuring import one_step, peak_error, weights_hash
from tests.runtime.ranks.processes import Pool
from tests.strategies.plans import plans_of_ranks

from .prove_claims import Claim, Settings

_SUBJECTS: Final = (
    "llama, tied",
    "gpt2 with dropout, tied",
    "gpt2, groups",
    "llama, frozen prologue and blocks",
    "llama in bfloat16",
    "hand-written, partly narrow",
    "hand-written, unused parameters",
    "hand-written, batch statistics",
    "gated",
    "mixtral, frozen experts",
)
"""Tied, dropout, groups, frozen, narrow, mixed, unused on all ranks, buffers, unused on some, mixture of experts."""
_MODES: Final = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)
_MORE: Final = (3, 4, 5)
"""Further numbers of ranks: shards are uneven, and some are empty."""
_MORE_PLANS: Final = 5
"""One in so many plans is tried with each of them, and its peak with settled lanes."""
_FEW: Final = 20
"""Of so many plans at least one is of every kind that its mode has."""
_DRAWN: Final = 40
_LIMIT: Final = 0.25
"""Of the norm: gradients of all these models are longer in their first steps."""
_PATIENCE_S: Final = 300.0

_Prove = Callable[[str, ParallelMode, Settings, Pool], Claim]


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """Claims for each model and mode, tried on random plans."""
    chosen = [name for name in _SUBJECTS if settings.has(name)]
    kinds: tuple[_Prove, ...] = (_prove_equality, _prove_peaks, _prove_more_ranks, _prove_one_end, _prove_groups)
    wanted = [(kind, name, mode) for kind in kinds for name in chosen for mode in _MODES if _is_of(kind, name, mode)]
    claims = []
    with Pool() as pool:
        for number, (kind, name, mode) in enumerate(wanted):
            claims.append(kind(name, mode, settings, pool))
            report(number + 1, len(wanted))
    return claims


def _is_of(kind: _Prove, name: str, mode: ParallelMode) -> bool:
    """Ranks that leave gates out save less than the workload says, which was traced with all gates open."""
    if kind is _prove_groups:
        return mode is ParallelMode.SHARDED
    if kind is _prove_one_end:
        # One claim speaks of all modes together.
        return mode is _MODES[0]
    return kind is not _prove_peaks or name != "gated"


def _num_batches(settings: Settings) -> int:
    """So many that five ranks have some of their own."""
    return max(12, settings.steps)


def _plans(name: str, mode: ParallelMode, settings: Settings, num_ranks: int, number: int) -> list[Plan]:
    """The same ones for the same seed; few are spread over many, since the first that are drawn are the simplest."""
    workload = all_cases(_num_batches(settings))[name].workload
    seed = (settings.seed * len(_SUBJECTS) + _SUBJECTS.index(name)) * len(_MODES) + _MODES.index(mode)
    drawn = different(plans_of_ranks(workload, mode, num_ranks), max(number, _DRAWN), seed)
    chosen = drawn[:: -(len(drawn) // number)][:number]
    limits = [None if plan.max_gradient_norm is None else _LIMIT for plan in chosen]
    return [plan.model_copy(update={"max_gradient_norm": limit}) for plan, limit in zip(chosen, limits, strict=True)]


def _prove_equality(name: str, mode: ParallelMode, settings: Settings, pool: Pool) -> Claim:
    claim = Claim(
        "ranks",
        f"{name}, {mode}",
        f"losses and weights of {settings.steps} steps on two ranks equal DDP's, bit for bit, in the guaranteed memory",
    )
    num_batches = _num_batches(settings)
    plans = _plans(name, mode, settings, 2, settings.plans)
    bound: set[str] = set()
    to_host_bytes = 0
    fullest_frac = 0.0
    for plan in plans:
        with claim.case(plan.to_json()):
            every = pool.of(2).run(train, name, plan, num_batches, settings.steps, patience_s=_PATIENCE_S)
            for rank, found in enumerate(every):
                _compare(rank, found)
                to_host_bytes += found.to_host_bytes
                fullest_frac = max(fullest_frac, found.peak_bytes / found.guaranteed_bytes)
            if every[0].has_bound:
                bound.add(plan.identity)
    kinds = _kinds(name, mode, plans, settings) | {"whose limit bound": len(bound)}
    claim.figures = kinds | {
        "to hosts": format_bytes(to_host_bytes),
        "of the guaranteed memory": f"{fullest_frac:.1%} at most",
    }
    if settings.plans >= _FEW:
        claim.failures += [f"no plan is one {kind}: that shows nothing" for kind, count in kinds.items() if not count]
    return claim


def _compare(rank: int, found: Found) -> None:
    """Raise AssertionError unless a rank did what it does under DistributedDataParallel."""
    assert found.losses == found.expected_losses, f"rank {rank}: the losses differ, {_first_difference(found)}"
    assert not found.different, (
        f"rank {rank}: weights differ by {found.worst:.1e} of the largest: {', '.join(found.different)}"
    )
    assert found.peak_bytes <= found.guaranteed_bytes, (
        f"rank {rank}: the peak is {found.peak_bytes} bytes, guaranteed are {found.guaranteed_bytes}"
    )


def _first_difference(found: Found) -> str:
    pairs = enumerate(zip(found.losses, found.expected_losses, strict=True))
    number, (own, expected) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"first that of micro-batch {number}, {own!r} instead of {expected!r}"


def _kinds(name: str, mode: ParallelMode, plans: list[Plan], settings: Settings) -> dict[str, int]:
    """How many plans are of each kind that ``mode`` has."""
    case = all_cases(_num_batches(settings))[name]
    num_blocks = case.workload.num_blocks
    found = {
        "swapping": sum(ActivationMode.SWAP in plan.modes(num_blocks) for plan in plans),
        "checkpointing": sum(ActivationMode.CHECKPOINT in plan.modes(num_blocks) for plan in plans),
        "with micro-batches": sum(plan.micro_batches > 1 for plan in plans),
    }
    if mode is not ParallelMode.DDP:
        found["whose gradients leave"] = sum(has_parts(case, plan) for plan in plans)
    if mode is ParallelMode.REPLICATED:
        found["stepped on hosts alone"] = sum(plan.n_host_stepped > 0 for plan in plans)
    if mode is ParallelMode.SHARDED:
        found["sharded over devices"] = sum(plan.n_shard > 0 for plan in plans)
    return found


def _prove_peaks(name: str, mode: ParallelMode, settings: Settings, pool: Pool) -> Claim:
    claim = Claim(
        "ranks",
        f"{name}, {mode}",
        f"measured peak of two ranks within {BAR:.1%} of the schedule's account, hosts within theirs, nothing left",
    )
    exact, worst_frac = 0, 0.0
    for plan in _few_plans(name, mode, settings, 2):
        with claim.case(plan.to_json()):
            every = pool.of(2).run(peak_error, name, plan, _num_batches(settings), patience_s=_PATIENCE_S)
            exact += all(error == 0 for error, *_ in every)
            worst_frac = max([worst_frac, *(abs(error) for error, *_ in every)])
            for rank, (error, host_bytes, said_bytes) in enumerate(every):
                assert abs(error) <= BAR, f"rank {rank}: the peak is {error:+.2%} outside of its account"
                assert host_bytes <= said_bytes, (
                    f"rank {rank}: the host has {host_bytes} bytes, the schedule's account is {said_bytes}"
                )
    claim.figures = {"to the byte": exact, "worst": f"{worst_frac:.3%}"}
    return claim


def _few_plans(name: str, mode: ParallelMode, settings: Settings, num_ranks: int) -> list[Plan]:
    return _plans(name, mode, settings, num_ranks, -(-settings.plans // _MORE_PLANS))


def _prove_more_ranks(name: str, mode: ParallelMode, settings: Settings, pool: Pool) -> Claim:
    claim = Claim(
        "ranks",
        f"{name}, {mode}",
        f"one step of {', '.join(map(str, _MORE))} ranks is that of the mean, within its rounding; "
        f"{settings.steps} steps have the same bits on all ranks and under another plan of the same layout",
    )
    num_batches = _num_batches(settings)
    worst = 0.0
    for num_ranks in _MORE:
        for plan in _few_plans(name, mode, settings, num_ranks):
            with claim.case(plan.to_json()):
                ranks = pool.of(num_ranks)
                # The rounding of the norm is not within the step's.
                free = plan.model_copy(update={"max_gradient_norm": None})
                gaps = ranks.run(one_step, name, free, num_batches, patience_s=_PATIENCE_S)
                worst = max(worst, *gaps)
                assert max(gaps) <= 1, f"a weight is {max(gaps):.2f} times the rounding of one step from the mean's"
                hashes = {
                    value
                    for one in (plan, _other_plan(plan))
                    for value in ranks.run(weights_hash, name, one, num_batches, settings.steps, patience_s=_PATIENCE_S)
                }
                assert len(hashes) == 1, f"{len(hashes)} different ends of both plans' {num_ranks} ranks"
    claim.figures = {"of the rounding": f"{worst:.2f} at most"}
    return claim


def _prove_groups(name: str, mode: ParallelMode, settings: Settings, pool: Pool) -> Claim:
    claim = Claim(
        "ranks",
        f"{name}, {mode} in groups",
        f"losses, weights and state of {settings.steps} steps of two groups of two ranks equal a plain loop's, bit for "
        f"bit, in the guaranteed memory",
    )
    plans = [plan.model_copy(update={"shard_ranks": 2}) for plan in _plans(name, mode, settings, 4, settings.plans)]
    for plan in plans:
        with claim.case(plan.to_json()):
            num_batches = _num_batches(settings)
            every = pool.of(4).run(train_grouped, name, plan, num_batches, settings.steps, patience_s=_PATIENCE_S)
            for rank, found in enumerate(every):
                assert found.losses == found.expected_losses, f"rank {rank}: the losses differ"
                different_names = [*found.different, *found.different_in_state]
                assert not different_names, f"rank {rank}: weights differ: {', '.join(different_names)}"
                assert found.peak_bytes <= found.guaranteed_bytes, (
                    f"rank {rank}: the peak is {found.peak_bytes} bytes, guaranteed are {found.guaranteed_bytes}"
                )
    claim.figures = dict(_kinds(name, mode, plans, settings))
    return claim


def _prove_one_end(name: str, mode: ParallelMode, settings: Settings, pool: Pool) -> Claim:
    claim = Claim(
        "ranks",
        f"{name}, all modes",
        f"{settings.steps} steps of {', '.join(map(str, _MORE))} ranks have the same bits in every mode and layout",
    )
    num_batches, layouts = _num_batches(settings), set()
    for num_ranks in _MORE:
        found: dict[str, str] = {}
        for plan in (one for other in _MODES for one in _few_plans(name, other, settings, num_ranks)):
            with claim.case(plan.to_json()):
                simple = plan.model_copy(update={"micro_batches": 1, "max_gradient_norm": None})
                layouts.add((simple.chunk_bytes, simple.n_persist))
                ends = pool.of(num_ranks).run(
                    weights_hash, name, simple, num_batches, settings.steps, patience_s=_PATIENCE_S
                )
                found.update(dict.fromkeys(ends, plan.identity))
                assert len(found) == 1, f"another end than that of plan {next(iter(found.values()))}"
    claim.figures = {"layouts": len(layouts)}
    return claim


def _other_plan(plan: Plan) -> Plan:
    """A plan with the same chunks at the same places, whose activations stay and whose gathers come early."""
    knobs = {"n_swap": 0, "n_checkpoint": 0, "n_offload_input": 0, "activation_modes": None}
    return plan.model_copy(
        update=knobs | {"n_buffer": plan.n_buffer + 1, "prefetch_depth": 1 + plan.prefetch_depth % 3}
    )
