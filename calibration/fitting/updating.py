"""Learning from runs: any measured record updates a calibration, or makes one where there is none.

What tasks have told is kept as sums ([Note: Evidence]), so that records may come at once or one after another, in any
order.  Before new ones are added, what was known of the kinds that they have is multiplied by ``forgetting``: with 0.5
the latest update counts as much as all before it.  What lanes do to each other, and what optimizers cost by themselves,
no record tells; it stays what was measured.

How far predictions are off (``iteration_error_frac``) is told by what the calibration said of each run before it learnt
from it, and without a calibration by what the other records say of each plan; how far for another model
(``transfer_error_frac``), by what it said of a model's runs before it had seen any.

[Note: Records that contradict]
Sums give every record its say, so that one that was spoilt moves all factors, and makes none of them look unsure: its
tasks are many.  So records that come together are held against what all of them say: one whose iterations take more
than ``MOST_APART`` times as long as that, or as short, in proportion to the others', is put aside, and what is left is
asked again.  Records that were put aside are refused by name.  What was known before is no judge of them: a machine may
have changed, and all new records then say so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...runtime.recording.timed_iterations import LEAST_TIMED
from ...shared.basics.errors import CalibrationError
from ...shared.compile.compile import compile_schedule
from ...shared.records.calibrated import check_figures
from ...shared.records.soundness import why_unsound_ranks
from ...shared.schema.calibration import Calibration, Evidence, MeanSeconds
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Origin, Record
from ...shared.schema.schedule import TaskKind
from ...shared.schema.workload import Workload
from ...sim.engine.error_sources import RUN_NOISE
from ..estimation.evidence import estimate_evidence, evidence_before, evidence_of, together
from .fit import Pair, check_record, columns_of, fit, gap_of, pairs_of, with_estimates
from .left_out import iteration_error_frac, left_out_error_frac, model_error_frac

FORGETTING: Final = 0.5
"""What is left of what was known, with every update."""
MOST_NOISE_FRAC: Final = 0.25
"""Of an iteration: beyond it, times say more about what else ran on the machine."""
MOST_APART: Final = 1.5
"""Times as long as all records together say, or as short: plans of one machine are predicted within a quarter, and
models that one set of factors does not hold for within a half."""
_NEARLY: Final = 0.8
"""Records that are nearly as far off, in logarithms, as the farthest are put aside with it."""
_MOST_NAMED: Final = 3


def updated(
    calibration: Calibration | None,
    pairs: Sequence[Pair],
    hardware: Hardware,
    *,
    forgetting: float = FORGETTING,
) -> Calibration:
    """``calibration`` with what ``pairs`` have told; without one, a calibration from them alone.

    ``forgetting``: what is left (0..1) of what was known of kinds of tasks that the new records have; 1 forgets
    nothing, and the order of updates does not matter.  A pair is a measured Record with its workload; workloads may
    differ.
    Raises CalibrationError if a record is of another machine, software or workload, predicted, of fewer than
    ``LEAST_TIMED`` iterations, without some rank of its plan, or noisier than ``MOST_NOISE_FRAC``, if there is none,
    if one occurs twice or contradicts the others, and as ``fit`` does.
    """
    if not 0 < forgetting <= 1:
        raise CalibrationError(f"forgetting is {forgetting}; what is left of what was known lies above 0, up to 1.")
    if not pairs:
        raise CalibrationError("there are no measured records to learn from. Give one at least (--from).")
    if calibration is not None:
        _check_machine(calibration, hardware)
    for pair in pairs:
        _check(pair, calibration, hardware, pairs[0].measured.software)
    _check_distinct(pairs)
    known = calibration or _nothing_known(pairs[0].measured, hardware)
    told = [_Told(pair, evidence_by_kind([pair], hardware, known)) for pair in pairs]
    _check_agreement(told, known, hardware)
    of_models = {
        name: _added(one.evidence for one in told if one.pair.workload.model_name == name)
        for name in dict.fromkeys(pair.workload.model_name for pair in pairs)
    }
    new = _added(of_models.values())
    evidence = dict(known.evidence)
    for kind, of_kind in new.items():
        before = evidence_before(known, kind)
        evidence[kind] = of_kind if before is None else together(before, of_kind, forgetting=forgetting)
    num_before = 0 if calibration is None else known.num_runs
    noise_frac = _noise_frac(known, forgetting * num_before, pairs)
    # Of all kinds: how noisy runs are counts for those too that the new ones lack.
    run_std_frac = RUN_NOISE * noise_frac
    estimates = {kind: estimate_evidence(of_kind, hardware, run_std_frac) for kind, of_kind in evidence.items()}
    found = with_estimates(known, estimates)
    names = dict.fromkeys((*known.fitted_to, *(pair.workload.model_name for pair in pairs)))
    return found.model_copy(
        update={
            **{name: getattr(known, name) | getattr(found, name) for name in _BY_KIND},
            "evidence": evidence,
            **_bases(known, pairs, hardware),
            "swapping": _swapping(known, pairs, hardware, forgetting),
            "iteration_noise_frac": noise_frac,
            **_transfer(known, of_models, pairs, hardware),
            "iteration_error_frac": _left_out_error_frac(told, known, hardware)
            if calibration is None
            else _error_frac(calibration, forgetting * num_before, pairs, hardware),
            "fitted_to": tuple(names),
            "num_runs": num_before + len(pairs),
        }
    )


def _nothing_known(record: Record, hardware: Hardware) -> Calibration:
    """Of the machine and the software of ``record``, before anything was learnt."""
    return Calibration(
        hardware_name=hardware.name,
        machine=record.machine,
        software=dict(record.software),
        hardware=hardware,
        of_timed_phases=False,
    )


def _bases(known: Calibration, pairs: Sequence[Pair], hardware: Hardware) -> dict[str, bool]:
    """Whether phases were timed on the machine, as fields of a calibration: those of ``pairs``, and of all before."""
    timed = {pair.workload.measured_on == hardware.name for pair in pairs}
    return {
        "of_timed_phases": known.of_timed_phases or True in timed,
        "of_modelled_phases": known.of_modelled_phases or False in timed,
    }


_BY_KIND: Final = ("factors", "overhead_s", "overhead_std_s", "arrival_s_per_byte", "arrival_std_s_per_byte")


def _noise_frac(known: Calibration, num_before: float, pairs: Sequence[Pair]) -> float:
    """The mean over runs, of which those before count as ``num_before``."""
    noise = [pair.measured.iteration_noise_frac for pair in pairs]
    return (num_before * known.iteration_noise_frac + sum(noise)) / (num_before + len(noise))


class _Told(NamedTuple):
    """A pair, and what it tells by itself."""

    pair: Pair
    evidence: dict[TaskKind, Evidence]


def _by(told: Iterable[_Told], known: Calibration, hardware: Hardware) -> Calibration:
    """``known`` with what these records tell alone in the place of what it says of their kinds of tasks."""
    estimates = {kind: estimate_evidence(one, hardware) for kind, one in _added(one.evidence for one in told).items()}
    found = with_estimates(known, estimates)
    return found.model_copy(update={name: getattr(known, name) | getattr(found, name) for name in _BY_KIND})


def _left_out_error_frac(told: Sequence[_Told], known: Calibration, hardware: Hardware) -> float | None:
    """Root mean square over runs, each plan predicted by what the others tell; None where none can be left out."""
    runs = [(one, of_rank) for one in told for of_rank in pairs_of(one.pair.workload, one.pair.measured)]

    def fitted(places: Iterable[int]) -> Calibration:
        # A record of several ranks is left out as a whole, so each of its ranks stands for all.
        return _by({id(runs[place][0]): runs[place][0] for place in places}.values(), known, hardware)

    return left_out_error_frac([(of_rank.workload, of_rank.measured) for _, of_rank in runs], hardware, fitted)


def _check_agreement(told: Sequence[_Told], known: Calibration, hardware: Hardware) -> None:
    """Raise CalibrationError if records contradict the others ([Note: Records that contradict])."""
    kept, most = list(range(len(told))), math.log(MOST_APART)
    logs: list[float] = []
    while len(kept) > 1:
        said = _by((told[place] for place in kept), known, hardware)
        logs = [_log_of(one.pair, hardware, said) for one in told]
        middle = statistics.median(logs[place] for place in kept)
        logs = [one - middle for one in logs]
        farthest = max(abs(logs[place]) for place in kept)
        if farthest <= most:
            break
        kept = [place for place in kept if abs(logs[place]) < max(most, _NEARLY * farthest)]
    # What was put aside with others is near enough to what is left, perhaps.
    apart = [place for place, one in enumerate(logs) if place not in kept and abs(one) > most]
    if not apart:
        return
    num_others = len(told) - len(apart)
    if 2 * num_others <= len(told):
        order = sorted(range(len(told)), key=lambda place: logs[place])
        fast, slow = told[order[0]].pair.name, told[order[-1]].pair.name
        raise CalibrationError(
            f"the records contradict each other: by one set of factors {slow} takes "
            f"{math.exp(logs[order[-1]] - logs[order[0]]):.3g} times as long as {fast}, and which of them the machine "
            f"is like nobody can tell. Measure again when nothing else runs, or learn from one of them alone."
        )
    names = ", ".join(
        f"{told[place].pair.name} took {math.exp(logs[place]):.3g} times" for place in apart[:_MOST_NAMED]
    )
    more = f" (and {len(apart) - _MOST_NAMED:,} more)" if len(apart) > _MOST_NAMED else ""
    them = "it" if len(apart) == 1 else "them"
    raise CalibrationError(
        f"{names}{more} what the other {num_others:,} records say; beyond {MOST_APART:g} times, or one over it, "
        f"records contradict each other. Something else ran, or the machine has changed: leave {them} out, or learn "
        f"from {them} alone, in an update of its own."
    )


def _log_of(pair: Pair, hardware: Hardware, calibration: Calibration) -> float:
    """Logarithm of measured over predicted seconds of an iteration, the mean over ranks."""
    return statistics.fmean(
        -math.log1p(iteration_error_frac(one.workload, one.measured, hardware, calibration))
        for one in pairs_of(pair.workload, pair.measured)
    )


def _error_frac(calibration: Calibration, num_before: float, pairs: Sequence[Pair], hardware: Hardware) -> float:
    """Root mean square over runs, of which those before count as ``num_before``."""
    squares = [
        iteration_error_frac(of_rank.workload, of_rank.measured, hardware, calibration) ** 2
        for pair in pairs
        for of_rank in pairs_of(pair.workload, pair.measured)
    ]
    if calibration.iteration_error_frac is None:
        return math.sqrt(statistics.fmean(squares))
    before = num_before * calibration.iteration_error_frac**2
    return math.sqrt((before + len(pairs) * statistics.fmean(squares)) / (num_before + len(pairs)))


def _transfer(
    known: Calibration, of_models: Mapping[str, Mapping[TaskKind, Evidence]], pairs: Sequence[Pair], hardware: Hardware
) -> dict[str, Any]:
    """How far predictions for a model are off that nothing was learnt from, as fields of a calibration.

    Models that are new to ``known`` tell, by what it said of them; without any known model each of several by what the
    others say of it.  ``of_models``: what each model's ``pairs`` tell.
    """
    before = (known.transfer_error_frac or 0.0) ** 2 * known.num_transfers
    squares = []
    for name in of_models:
        if name in known.fitted_to:
            continue
        others = known
        if not known.fitted_to:
            told = _added(of_kind for other, of_kind in of_models.items() if other != name)
            others = with_estimates(known, {kind: estimate_evidence(one, hardware) for kind, one in told.items()})
        runs = [
            (one.workload, one.measured)
            for pair in pairs
            if pair.workload.model_name == name
            for one in pairs_of(pair.workload, pair.measured)
        ]
        error_frac = model_error_frac(runs, hardware, others)
        squares += [] if error_frac is None else [error_frac**2]
    if not squares:
        return {}
    number = known.num_transfers + len(squares)
    return {"transfer_error_frac": math.sqrt((before + sum(squares)) / number), "num_transfers": number}


def _added(of_models: Iterable[Mapping[TaskKind, Evidence]]) -> dict[TaskKind, Evidence]:
    """What all of them tell."""
    found: dict[TaskKind, Evidence] = {}
    for of_kinds in of_models:
        for kind, one in of_kinds.items():
            found[kind] = together(found[kind], one) if kind in found else one
    return found


def evidence_by_kind(pairs: Sequence[Pair], hardware: Hardware, calibration: Calibration) -> dict[TaskKind, Evidence]:
    """What the tasks of ``pairs`` tell, each pair by itself, with the contention that ``calibration`` has."""
    return _added(
        {kind: _of_one_run(one, len(ranks)) for kind, one in _evidence_of_one(rank, hardware, calibration).items()}
        for given in pairs
        for ranks in [pairs_of(given.workload, given.measured)]
        for rank in ranks
    )


def _of_one_run(of_rank: Evidence, num_ranks: int) -> Evidence:
    """What one of several ranks tells, whose sums together are those of one run: of n ranks n * n times one's."""
    return of_rank.model_copy(update={"run_products": tuple(num_ranks * one for one in of_rank.run_products)})


_OF_OPTIMIZERS: Final = (
    "host_optimizer_factors",
    "device_optimizer_factors",
    "host_optimizer_tensor_s",
    "device_optimizer_tensor_s",
)
"""Measured by themselves."""


def _alone(pair: Pair, hardware: Hardware, calibration: Calibration) -> Calibration:
    """What a record tells alone: the same whatever else is known."""
    return fit(
        [pair],
        hardware,
        contention=calibration.contention,
        machine=calibration.machine,
        software=calibration.software,
        optimizers={name: getattr(calibration, name) for name in _OF_OPTIMIZERS},
    ).calibration


def _swapping(
    known: Calibration, pairs: Sequence[Pair], hardware: Hardware, forgetting: float
) -> dict[TaskKind, MeanSeconds]:
    """What tasks of blocks that swap take longer: the mean over runs, of which those before count in part."""
    found = dict(known.swapping)
    left = dict.fromkeys(found, forgetting)
    for pair in (one for given in pairs for one in pairs_of(given.workload, given.measured)):
        if all(timing.kind is not TaskKind.ACTIVATION_OFFLOAD for timing in pair.measured.tasks):
            continue
        for kind, new in _alone(pair, hardware, known).swapping.items():
            before = found.get(kind, MeanSeconds(num_tasks=0))
            num_before = left.pop(kind, 1.0) * before.num_tasks
            number = num_before + new.num_tasks
            seconds = (num_before * before.seconds + new.num_tasks * new.seconds) / number
            found[kind] = MeanSeconds(seconds=seconds, num_tasks=number)
    return found


def _evidence_of_one(pair: Pair, hardware: Hardware, calibration: Calibration) -> dict[TaskKind, Evidence]:
    """Slowdowns are those under the factors of this record alone."""
    own = _alone(pair, hardware, calibration)
    bare = Calibration(
        hardware_name=hardware.name,
        machine=calibration.machine,
        software=calibration.software,
        **{name: getattr(calibration, name) for name in _OF_OPTIMIZERS},
    )
    columns = columns_of(pair, hardware, own, bare)
    # What passes between iterations is part of the task that ends one.
    columns[TaskKind.DEVICE_ADAM][2][-1] += gap_of(
        pair.measured, compile_schedule(pair.measured.plan, pair.workload)
    ).seconds
    return {kind: evidence_of(*of_kind) for kind, of_kind in columns.items()}


def paired(records: Sequence[tuple[str, Record]], workloads: Sequence[Workload]) -> list[Pair]:
    """Every record, by its name, with its workload.  Raises CalibrationError if one is of none of ``workloads``."""
    of_identity = {workload.identity: workload for workload in workloads}
    found = []
    for name, record in records:
        if record.plan.workload_id not in of_identity:
            known = ", ".join(f"{identity} ({one.model_name})" for identity, one in of_identity.items())
            raise CalibrationError(
                f"{name} is a record of workload {record.plan.workload_id} ({record.model_name}); given: {known}. Give "
                f"the workload that was trained (--workload)."
            )
        found.append(Pair(of_identity[record.plan.workload_id], record, name))
    return found


def _check_machine(calibration: Calibration, hardware: Hardware) -> None:
    """Raise CalibrationError if what was known is of another machine, or of other figures of it."""
    if calibration.hardware_name != hardware.name:
        raise CalibrationError(
            f"the calibration is of {calibration.hardware_name}, and the hardware is {hardware.name}. Give the "
            f"hardware file that it was made with, or leave the calibration out."
        )
    check_figures(calibration, hardware)


def _check(pair: Pair, calibration: Calibration | None, hardware: Hardware, software: Mapping[str, str]) -> None:
    record = pair.measured
    if record.origin is not Origin.MEASURED:
        raise CalibrationError("a predicted record was given as a measurement. Learn from records of real runs.")
    machines = {record.machine, *(one.machine for one in record.ranks)}
    strange = sorted(machines - {hardware.name, _of_ranks(hardware.name)})
    if strange:
        raise CalibrationError(
            f"{pair.name} was measured on {strange[0]}, and the hardware is {hardware.name}. What one machine takes "
            f"says nothing about another: give the hardware file of that machine."
        )
    expected = software if calibration is None else calibration.software
    changed = sorted(
        name for name in expected.keys() | record.software.keys() if expected.get(name) != record.software.get(name)
    )
    if changed:
        name = changed[0]
        raise CalibrationError(
            f"{pair.name} was measured with {name} {record.software.get(name, 'unknown')}, and what is known was with "
            f"{name} {expected.get(name, 'unknown')}. Calibrate anew with this software."
        )
    wrong = why_unsound_ranks(record)
    if wrong is not None:
        raise CalibrationError(f"{pair.name} {wrong}. Nothing can be learnt from it: leave it out, or measure again.")
    schedule = compile_schedule(record.plan, pair.workload)
    for of_rank in pairs_of(pair.workload, record):
        check_record(of_rank if record.ranks else pair, schedule)
    _check_times(pair)


def _check_distinct(pairs: Sequence[Pair]) -> None:
    """Raise CalibrationError if a record occurs twice: times to the nanosecond are no two runs'."""
    seen: dict[tuple[str, float], list[Pair]] = {}
    for pair in pairs:
        alike = seen.setdefault((pair.measured.plan_id, pair.measured.iteration_s), [])
        for other in alike:
            if other.measured == pair.measured:
                raise CalibrationError(
                    f"{pair.name} holds the same run as {other.name}, which would count twice. Give it once."
                )
        alike.append(pair)


def _check_times(pair: Pair) -> None:
    """Raise CalibrationError if the times of its Record say too little."""
    record = pair.measured
    if record.num_iterations < LEAST_TIMED:
        iterations = "1 timed iteration" if record.num_iterations == 1 else f"{record.num_iterations} timed iterations"
        raise CalibrationError(
            f"{pair.name} has {iterations}; {LEAST_TIMED} are the least that say something about a machine. Train "
            f"longer."
        )
    if record.iteration_noise_frac > MOST_NOISE_FRAC:
        raise CalibrationError(
            f"iterations of {pair.name} lie {record.iteration_noise_frac:.0%} apart, and {MOST_NOISE_FRAC:.0%} is the "
            f"most that times can be learnt from: something else runs on the machine. Measure again when it is quiet."
        )


def _of_ranks(hardware_name: str) -> str:
    """The machine of which ``hardware_name`` is all, where it was probed by several ranks (``name_of_ranks``)."""
    return hardware_name.rpartition(", shared by ")[0] or hardware_name
