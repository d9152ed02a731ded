"""Models that run a module several times train as the plain loop, by plans whose blocks are its runs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out, trace
from protwin.runtime.hooks.block_runs import BlockRuns
from protwin.runtime.hooks.section_walker import SectionWalker
from protwin.runtime.model.blocks import find_blocks
from protwin.shared.basics.errors import ProtwinError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import largest_block_bytes, largest_block_elements
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import BlockId
from protwin.sim.space.enumerate import chunk_sizes
from tests.runtime.accounts import BAR, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import offloaded_chunks, random_plans, trained
from tests.runtime.models import SEED, Case, HandWritten, point_batches


class Programmed(HandWritten):
    """Runs the blocks of its stack in the order of ``program``."""

    def __init__(self, program: Sequence[int]) -> None:
        super().__init__(num_layers=1 + max(program))
        self.program = program

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        hidden = self.entry(points)
        for place in self.program:
            hidden = self.stack[place](hidden)
        return self.exit(hidden)


def programmed(program: Sequence[int]) -> Programmed:
    torch.manual_seed(SEED)
    return Programmed(program)


def programs(number: int) -> list[tuple[int, ...]]:
    """In each, every block runs at least once and one of them more often."""
    random = Random(11)
    found = []
    for _ in range(number):
        blocks = range(random.choice((1, 2, 3)))
        program = [*blocks, *random.choices(blocks, k=random.choice((1, 2, 3)))]
        random.shuffle(program)
        found.append(tuple(program))
    return found


def case_of(program: Sequence[int]) -> Case:
    return Case(lambda: programmed(program), point_batches(), has_loss=False)


def check(case: Case, plan: Plan) -> None:
    """The plain loop's bits within the guarantee, at the account's peak."""
    outcome = trained(case, plan)
    expected = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    assert outcome.losses == expected.losses, plan
    assert outcome.different == [], plan
    error = error_frac(measured_peak_bytes(case, plan), eager_peak(compile_schedule(plan, case.workload)))
    assert error == pytest.approx(0, abs=BAR), plan


@pytest.mark.parametrize("program", programs(6), ids=str)
def test_random_programs_train_as_the_plain_loop(program: tuple[int, ...]) -> None:
    case = case_of(program)
    assert [block.name for block in case.workload.blocks] == [f"stack.{place}" for place in program]
    for plan in random_plans(case.workload, 3, seed=sum(program), has_disk=False):
        check(case, plan)


def test_most_plans_tried_move_chunks_that_several_runs_share() -> None:
    moved = [
        any(len(chunk.forward) > 1 for chunk in offloaded_chunks(case.workload, plan))
        for case in map(case_of, programs(6))
        for plan in random_plans(case.workload, 3, seed=sum(case.build().program), has_disk=False)
    ]
    assert sum(moved) > len(moved) // 2


def test_blocks_of_one_module_are_as_large_as_blocks_of_their_own() -> None:
    """Chunks, and what other systems gather, go by the largest block."""
    again, once = (case_of(program).workload for program in ((0, 1, 0, 1), (0, 1)))
    assert largest_block_bytes(again) == largest_block_bytes(once)
    assert largest_block_elements(again) == largest_block_elements(once)
    assert chunk_sizes(again) == chunk_sizes(once)


def test_an_evaluation_between_two_steps() -> None:
    case = case_of((0, 1, 0, 1, 1))
    plan = plan_of(case, "mixed", "offloaded")
    points, model = case.batches[0]["points"], case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training, training.evaluation():
        found = [model.eval()(points) for _ in range(2)]
    expected = case.build().eval()(points)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


def test_a_wrong_variant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run in the mode of its module's first one."""
    case = case_of((0, 1, 0, 1, 1))
    monkeypatch.setattr(SectionWalker, "_latest", lambda self, places: BlockId(places[0]))
    with pytest.raises((AssertionError, KeyError, ProtwinError, RuntimeError)):
        check(case, plan_of(case, "mixed inputs", "offloaded"))


def places_told(model: Programmed) -> list[tuple[str, int]]:
    """Of a forward that fails on its way, and of a whole one."""
    told: list[tuple[str, int]] = []
    blocks = find_blocks(model, [f"stack.{place}" for place in model.program])
    runs = BlockRuns(
        model,
        blocks,
        on_enter=lambda place, given: told.append(("enter", place)),
        on_leave=lambda place, given, output: told.append(("leave", place)),
    )
    points = point_batches(1)[0]["points"]
    failing = model.stack[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(points)
    failing.remove()
    model(points)
    runs.remove()
    model(points)
    return told


def test_runs_are_counted_anew_in_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = programmed((0, 0, 1, 0))
    whole = [(what, place) for place in range(4) for what in ("enter", "leave")]
    assert places_told(model) == [*whole[:5], *whole]
    monkeypatch.setattr(BlockRuns, "_restart", lambda self, *_: None)
    assert places_told(model) != [*whole[:5], *whole]


@pytest.mark.parametrize("blocks", ["stack", ["stack.0", "stack.1"], ["stack.0", "stack.1", "stack.0"]], ids=str)
def test_blocks_that_are_named_run_as_often_as_they_run(blocks: str | list[str]) -> None:
    model, batch = programmed((0, 1, 0)), point_batches(1)[0]["points"]
    found = trace(model, batch, loss=lambda output, _: output.sum(), blocks=blocks, repeats=0)
    assert [block.name for block in found.blocks] == ["stack.0", "stack.1", "stack.0"]


def test_another_number_of_runs_than_traced_is_refused() -> None:
    case = case_of((0, 0, 0))
    plan = random_plans(case.workload, 1, seed=0, has_disk=False)[0]
    for program, message in (((0, 0), "while its chunk is not on the device"), ((0,) * 4, "expects no further block")):
        model = case.build()
        with carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
            model.program = program
            with pytest.raises(ScheduleError, match=message):
                case.loss(model, case.batches[0]).backward()
            training.skip_step()


class Looping(nn.Module):
    """The same layer as often as a sum over the batch asks for: no plan can foresee how often."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList([HandWritten(num_layers=1).stack[0]])
        self.exit = nn.Linear(24, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = self.rows[0](x)
        return self.exit(x).sum()


def test_a_block_that_runs_more_often_every_time_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rows\.0.*as often as a batch asks for"):
        trace(Looping(), torch.ones(2, 24), repeats=0)


class ProgrammedInNarrow(Programmed):
    """The same within autocast, which casts each weight once for all of its runs."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(points).float()


@pytest.mark.parametrize("mix", ["mixed", "swapped"])
def test_casts_that_autocast_keeps_serve_every_run(mix: str) -> None:
    def build() -> Programmed:
        torch.manual_seed(SEED)
        return ProgrammedInNarrow((0, 1, 0, 1, 1))

    case = Case(build, point_batches(), has_loss=False)
    plan = plan_of(case, mix, "offloaded")
    outcome, expected = trained(case, plan), case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    assert outcome.losses == expected.losses
    assert outcome.different == []
    accounted = eager_peak(compile_schedule(plan, case.workload))
    assert error_frac(measured_peak_bytes(case, plan), accounted) < BAR
