"""Embeddings whose rows are looked up on the host: the plain loop's bits, what travels, and the account of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.chunks.row_lookups import RowGradients
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.looked_up import as_planned
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import Plan, mode_counts
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR, CHUNK_BYTES, MIXTURES, error_frac, measured_peak_bytes
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import trained
from tests.runtime.families import family_cases
from tests.runtime.models import SEED, Case, cases

TIED, UNTIED = "gpt2 with dropout, tied", "llama"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class TwoTables(nn.Module):
    """Two lookups of one table, one of another with padding; neither is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 8, padding_idx=3)
        self.kinds = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.kinds(tokens % 5) * self.words(tokens.flip(1))
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden.mean(1))
        return out


def two_tables() -> nn.Module:
    torch.manual_seed(SEED)
    return TwoTables()


def batches_of_tokens(steps: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(0, 31, (steps, 3, 9), generator=generator)
    return [{"points": tokens, "classes": tokens[:, 0] % 3} for tokens in drawn]


def two_tables_case() -> Case:
    return Case(two_tables, batches_of_tokens(), has_loss=False)


class LargeTable(nn.Module):
    """A table of many rows before a small model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6_000, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens * 97)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden.mean(1))
        return out


def large_table() -> nn.Module:
    torch.manual_seed(SEED)
    return LargeTable()


def plan_for(case: Case, **knobs: Any) -> Plan:
    """Everything on the host, rows looked up, with one buffer more than are needed."""
    workload = case.workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=0,
        n_buffer=0,
        looks_up_rows=True,
        **knobs,
    )
    _, planned = as_planned(plan, workload, layout)
    return plan.model_copy(update={"n_buffer": planned.min_buffers(0) + 1})


def subject(name: str) -> Case:
    return cases()[name] if name in cases() else family_cases()[name]


# -- bits ------------------------------------------------------------------------------------------------------------

KNOBS = ({}, {"micro_batches": 2, "n_checkpoint": 1}, {"max_gradient_norm": 0.5, "prefetch_depth": 4})
NAMES = (UNTIED, "llama in bfloat16", "llama, frozen prologue and blocks", "llama, tied", "bert", "t5")


@some_quick(
    ("name", "knobs"), [*((TIED, knobs) for knobs in KNOBS), *((name, KNOBS[1]) for name in NAMES)], quick=3, ids=str
)
def test_rows_train_as_whole_tables_do(name: str, knobs: dict[str, Any]) -> None:
    case = subject(name)
    plan = plan_for(case, **knobs)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []
    schedule = compile_schedule(plan, case.workload)
    per_step = sum(task.moved_bytes for task in schedule.tasks if task.lane == "d2h")
    assert outcome.to_host_bytes == len(case.steps(plan.micro_batches)) * per_step


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_tables_that_are_looked_up_twice_and_padded(knobs: dict[str, Any]) -> None:
    """The sum of a micro-batch's lookups comes before the sum over micro-batches."""
    case = two_tables_case()
    plan = plan_for(case, **knobs)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []


def test_rows_that_are_added_up_in_another_order_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the last row first."""
    sums = RowGradients.sums

    def from_behind(self: RowGradients, *, is_wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
        turned = RowGradients(self.place, self.indices.flip(0), self.padding_index, self.values.flip(0))
        return sums(turned, is_wide=is_wide)

    monkeypatch.setattr(RowGradients, "sums", from_behind)
    case = two_tables_case()
    outcome = trained(case, plan_for(case))
    assert outcome.different == ["kinds.weight"]


# -- memory ----------------------------------------------------------------------------------------------------------


@some_quick(
    ("name", "mixture"),
    [*((UNTIED, mixture) for mixture in MIXTURES), ("llama, tied", "mixed"), ("t5", "mixed")],
    quick=3,
)
def test_the_peak_is_the_schedules_own(name: str, mixture: str) -> None:
    case = subject(name)
    modes = [MIXTURES[mixture][block % len(MIXTURES[mixture])] for block in range(case.workload.num_blocks)]
    plan = plan_for(
        case,
        activation_modes=tuple(modes),
        **mode_counts(modes),
        prefetch_depth=2,
    )
    accounted = eager_peak(compile_schedule(plan, case.workload))
    assert error_frac(measured_peak_bytes(case, plan), accounted) == pytest.approx(0, abs=BAR)


def test_a_table_larger_than_the_device_trains() -> None:
    """Gathered, it alone exceeds the budget; evaluation looks rows up too."""
    case = Case(large_table, batches_of_tokens(), has_loss=False)
    plan = plan_for(case)
    budget_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    model = case.build()
    table_bytes = model.table.weight.numel() * 4
    assert table_bytes > budget_bytes
    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice(budget_bytes)
    ) as training:
        for number, batch in enumerate(case.batches[:2]):
            with training.evaluation(), torch.no_grad():
                before = case.loss(model, batch).item()
            loss = case.loss(model, batch)
            loss.backward()
            training.step()
            assert before == loss.item() == case.plain.losses[number]
        assert training.peak_device_bytes <= budget_bytes
    assert type(model.table.weight) is nn.Parameter


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_a_lookup_that_needs_the_table_is_no_lookup_of_rows(options: dict[str, Any]) -> None:
    case = two_tables_case()
    model = case.build()
    model.kinds = nn.Embedding(5, 8, **options)
    workload = trace(model, case.batches[0]["points"], loss=lambda output, _: output.sum(), repeats=0)
    assert workload.row_lookups is None
    plan = Plan(workload_id=workload.identity, chunk_bytes=CHUNK_BYTES, n_persist=0, n_buffer=9, looks_up_rows=True)
    with pytest.raises(PlanError, match="looks_up_rows: TwoTables has no embedding"):
        compile_schedule(plan, workload)


def test_a_table_that_stays_on_the_device_is_not_looked_up_on_the_host() -> None:
    plan = plan_for(cases()[UNTIED]).model_copy(update={"n_persist": 1})
    with pytest.raises(PlanError, match="chunk 0 holds an embedding and stays on the device"):
        compile_schedule(plan, cases()[UNTIED].workload)


def test_rows_are_not_added_up_in_a_wider_type() -> None:
    case = cases()["llama in bfloat16"]
    plan = plan_for(case, micro_batches=2).model_copy(update={"host_gradients": HostGradients.FLOAT32})
    with pytest.raises(PlanError, match="looks_up_rows with host_gradients float32"):
        compile_schedule(plan, case.workload)


def test_a_hook_on_the_gradient_of_a_table_is_refused() -> None:
    case = cases()[UNTIED]
    model = case.build()
    model.get_input_embeddings().weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[operator]
    with (
        carry_out(model, plan_for(case), case.workload, optimizer=case.make_optimizer) as training,
        pytest.raises(ScheduleError, match="has hooks on its gradient"),
    ):
        case.loss(model, case.batches[0])
    assert training is not None
