"""No task holds more than its schedule accounts for, whether or not the iteration's peak is there.

A peak hides what the tasks below it hold too much: a model whose forward ends in large logits, or one whose blocks are
wide, has it elsewhere.  So every task is held to its own level, with lanes that have done all they can before it
begins: what may come, has come.  What frames hold that have not returned yet when a task is announced is the next
task's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from random import Random

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, make_orthogonal
from protwin.runtime.recording.metering import METERED_ITERATIONS
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ActivationMode, Plan, ProjectionPlace, TrainingMethod, mode_counts
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.accounts import carried_out
from tests.runtime.eager_lanes import excesses, watched_stretches
from tests.runtime.hooks.test_offloaded_inputs import ROWS, WIDTH, Result, Wired
from tests.runtime.models import SEED, Case, RunTwice, held, llama, point_batches, token_batches
from tests.runtime.orthogonal import orthogonal_cases
from tests.runtime.quantized.models import quantized_cases

STEPS = METERED_ITERATIONS + 1
"""In the last one claims stand for operations."""


@lru_cache
def case_of(name: str) -> Case:
    """A Llama, models of other methods, or six blocks wired as ``name`` says."""
    if name == "llama":
        return Case(lambda: llama(num_layers=3), token_batches(1, length=24))
    if name in OF_OTHER_METHODS:
        return OF_OTHER_METHODS[name]()
    torch.manual_seed(SEED)
    return Case(lambda: Wired(name), [{"rows": torch.randn(ROWS, WIDTH)}])


def factorised_and_run_twice() -> nn.Module:
    torch.manual_seed(SEED)
    model = RunTwice(num_layers=3)
    make_orthogonal(model, unfreeze_rank_ratio=0.4, targets=["stack.*.up", "stack.*.down"])
    return model


OF_OTHER_METHODS: dict[str, Callable[[], Case]] = {
    "OSFT": lambda: orthogonal_cases()["llama, some maps and the head"],
    "OSFT, blocks run twice": lambda: Case(factorised_and_run_twice, point_batches(), has_loss=False),
    "nf4 in bfloat16, LoRA": lambda: quantized_cases()["nf4, double, in bfloat16"],
}


def moving_plan(case: Case, random: Random) -> Plan:
    """One in which copies come back in most sections: the tasks in which they land are what is looked at."""
    workload = case.workload
    travelling = (ActivationMode.SWAP, ActivationMode.OFFLOAD_INPUT)
    modes = tuple(random.choice((*travelling * 4, *ActivationMode)) for _ in range(workload.num_blocks))
    chunk_bytes = random.choice((1_000, 9_000, 40_000))
    layout = layout_of(workload, chunk_bytes)
    n_persist = random.choice((0, 0, 1, len(layout.chunks) // 2))
    places = (*ProjectionPlace,) if workload.method is TrainingMethod.OSFT else (ProjectionPlace.HOST,)
    return Plan(
        workload_id=workload.identity,
        method=workload.method,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + random.choice((0, 1, 3)),
        prefetch_depth=random.choice((1, 2, 3)),
        activation_modes=modes,
        micro_batches=random.choice((1, 2)),
        projects_gradients_on=random.choice(places),
        **mode_counts(modes),
    )


def measured_stretches(case: Case, plan: Plan) -> list[int]:
    """The ledger's peak from the begin of every compute task to that of the next one."""
    device, model = CpuDevice(), case.build()
    torch.manual_seed(SEED)
    with (
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training,
        watched_stretches(training, device.ledger) as found,
    ):
        for _ in range(STEPS):
            for batch in held(case, [case.batches[0]] * plan.micro_batches):
                case.loss(model, batch).backward()
            training.step()
    return found


def excesses_of(case: Case, plan: Plan) -> dict[str, int]:
    """By task, the bytes that it held beyond its account."""
    return excesses(compile_schedule(plan, case.workload), measured_stretches(case, plan), STEPS)


NAMES = ("none", "held", "stages", "skips", "activations at the end", "llama", *OF_OTHER_METHODS)


@some_quick(
    ("name", "number"),
    product(NAMES, range(3)),
    quick=[("held", 0), ("nf4 in bfloat16, LoRA", 0)],
)
def test_no_task_holds_more_than_its_schedule_accounts_for(name: str, number: int) -> None:
    case = case_of(name)
    plan = moving_plan(case, Random(f"{name} {number}"))
    assert excesses_of(case, plan) == {}, plan


# -- what frames hold until they return ------------------------------------------------------------------------------


class Block(nn.Module):
    """It saves what it makes, not what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) in and out."""
        return torch.tanh(self.weight(hidden * 0.5))


class LargeAtTheEnd(nn.Module):
    """A frozen head, larger than what it makes of the mean: nothing but its own weights is large in the epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4096).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> Result:
        """(rows, WIDTH)."""
        hidden = self.entry(rows)
        for layer in self.layers:
            hidden = layer(2 * hidden)
        return Result(self.head(hidden.mean(0)).sum())


def test_what_the_caller_of_the_last_block_holds_is_there_while_the_head_comes() -> None:
    """The head waits for the last block's buffers, and comes before the block's caller lets go of what it gave.

    This is the peak, which the guarantee covers and does not exceed.
    """

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return LargeAtTheEnd()

    case = Case(build, [{"rows": torch.randn(ROWS, WIDTH)} for _ in range(STEPS)])
    n_buffer = layout_of(case.workload, 1).min_buffers(0)
    plan = Plan(workload_id=case.workload.identity, chunk_bytes=1, n_persist=0, n_buffer=n_buffer)
    losses, _ = carried_out(case, plan)
    assert losses == case.plain.losses
    assert excesses_of(case, plan) == {}
    peak_bytes = max(measured_stretches(case, plan))
    assert peak_bytes == pytest.approx(guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes, abs=64)
