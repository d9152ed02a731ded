"""Out of memory at every task of a schedule: an error with its cause on the main thread, no hang, whole weights."""

from __future__ import annotations

from typing import Any, Final

from protwin.shared.basics.progress import OnProgress
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Lane, Task
from tests.runtime.models import cases
from tests.runtime.resuming import mixed, offloaded
from tests.runtime.running_out import Ending, run_out

from .prove_claims import Claim, Settings

_ITERATIONS: Final = (0, 1, 3)
"""The first one, one that is watched, and one that nobody watches."""
_WATCHED: Final = 1
_SUBJECTS: Final[tuple[tuple[str, Any, dict[str, Any]], ...]] = (
    ("llama, groups", mixed, {"n_swap": 1}),
    ("gpt2 with dropout, tied", offloaded, {}),
    ("llama in bfloat16", mixed, {"micro_batches": 2, "max_gradient_norm": 0.5, "n_swap": 1}),
)


def prove(settings: Settings, report: OnProgress) -> list[Claim]:
    """Three plans that have every kind of task between them."""
    chosen = [subject for subject in _SUBJECTS if settings.has(subject[0])]
    claims = []
    for place, (name, base, knobs) in enumerate(chosen):
        case = cases()[name]
        plan: Plan = base(case.workload).model_copy(update=knobs)
        tasks = compile_schedule(plan, case.workload).tasks
        runs = [(task, iteration, False) for iteration in _ITERATIONS for task in tasks]
        runs += [(task, _WATCHED, True) for task in tasks if task.lane is Lane.COMPUTE]
        for part, keep_last_step in enumerate((False, True)):
            endings = []
            for number, (task, iteration, at_allocation) in enumerate(runs):
                endings.append(
                    run_out(case, plan, task.id, iteration, at_allocation=at_allocation, keep_last_step=keep_last_step)
                )
                report(2 * place + part + (number + 1) / len(runs), 2 * len(chosen))
            claims.append(_claim(name, runs, endings, keep_last_step=keep_last_step))
    return claims


def _claim(name: str, runs: list[tuple[Task, int, bool]], endings: list[Ending], *, keep_last_step: bool) -> Claim:
    left = "the weights of the last step are left" if keep_last_step else "each chunk is left at a step, bit for bit"
    claim = Claim("exhaustion", name, f"out of memory at any task: the cause is told, nothing hangs, {left}")
    raised = [ending for ending in endings if ending.has_raised]
    claim.num_cases = len(raised)
    claim.figures = {
        "at a task's start": sum(not at_allocation for _, _, at_allocation in runs),
        "at its first allocation": sum(ending.has_raised for (_, _, at), ending in _pairs(runs, endings) if at),
        "all weights of one step": sum(ending.is_one_step for ending in raised),
    }
    claim.figures["of several steps"] = sum(not ending.is_one_step for ending in raised)
    for (task, iteration, _), ending in _pairs(runs, endings):
        where = f"{task.name} of iteration {iteration}"
        claim.failures += [f"{where}: {fault}" for fault in ending.faults]
        if keep_last_step and not ending.is_one_step:
            claim.failures.append(f"{where}: the weights are of several steps")
    return claim


def _pairs(runs: list[tuple[Task, int, bool]], endings: list[Ending]) -> list[tuple[tuple[Task, int, bool], Ending]]:
    return list(zip(runs, endings, strict=True))
