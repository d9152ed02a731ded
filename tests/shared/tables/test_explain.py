"""The account of a plan: by hand on small ones, and its sums against the schedule on random ones."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings

from protwin.shared.basics.units import format_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import Content, Memory, TaskKind
from protwin.shared.schema.workload import OuterSection, Uses, Workload
from protwin.shared.tables.explain import Account, SectionAccount, Stepper, account, explain, explain_plan
from tests.proof_size import examples
from tests.shared.small_models import (
    OUTPUT_BYTES,
    SAVED_BYTES,
    SWAPPABLE_BYTES,
    chain,
    parameter,
    plan,
    workload,
)
from tests.strategies.plans import PlannedWorkload, planned_workloads


def account_of(plan: Plan, workload: Workload) -> Account:
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    return account(compile_schedule(plan, workload, layout), plan, workload, layout)


def row(text: str, first: str) -> list[str]:
    """The cells of the row of a table that begins with ``first``."""
    lines = [line for line in text.splitlines() if line.split()[:1] == [first]]
    assert len(lines) == 1, text
    return [cell.strip() for cell in lines[0].split("  ") if cell.strip()]


def figures(section: SectionAccount) -> tuple[ActivationMode, int, int, int]:
    return section.mode, section.kept_bytes, section.recomputed_bytes, section.moved_bytes


def test_every_mode_by_hand() -> None:
    """Four blocks of one chunk each; the first persistent, two buffers for three chunks."""
    small = chain(4)
    found = account_of(plan(small, n_persist=1, n_buffer=2, n_checkpoint=1, n_swap=1), small)
    kept = (ActivationMode.KEEP, OUTPUT_BYTES + SAVED_BYTES, 0, 0)
    assert [figures(section) for section in found.sections] == [
        (ActivationMode.KEEP, OUTPUT_BYTES, 0, 0),
        (ActivationMode.SWAP, OUTPUT_BYTES + SAVED_BYTES - SWAPPABLE_BYTES, 0, 2 * SWAPPABLE_BYTES),
        kept,
        (ActivationMode.CHECKPOINT, OUTPUT_BYTES, SAVED_BYTES - 500, 0),
        kept,
        (ActivationMode.KEEP, 3_000, 0, 0),
    ]
    assert [section.name for section in found.sections] == ["prologue", *(f"layers.{b}" for b in range(4)), "epilogue"]
    assert [section.chunks for section in found.sections] == [(), (0,), (1,), (2,), (3,), ()]
    # Chunks 2 and 3 survive the turn from forward to backward; chunk 1 makes room for 3 and comes back.
    assert [chunk.num_gathers for chunk in found.chunks] == [0, 2, 1, 1]
    assert [chunk.gathered_bytes for chunk in found.chunks] == [0, 8_192, 4_096, 4_096]
    assert [chunk.gradient_bytes for chunk in found.chunks] == [0, 4_000, 4_000, 4_000]
    assert [chunk.is_persistent for chunk in found.chunks] == [True, False, False, False]
    assert [chunk.stepper for chunk in found.chunks] == [Stepper.DEVICE_ADAM, *[Stepper.CPU_ADAM] * 3]


def used_by(section: OuterSection) -> Uses:
    return Uses(forward=(section,), backward=(section,), gradient=section)


def test_the_text_of_a_plan_by_hand() -> None:
    small = workload(
        [
            parameter("embedding", 50, None).model_copy(update={"uses": used_by(OuterSection.PROLOGUE)}),
            parameter("layers.0.weight", 1_000, 0),
            parameter("layers.1.weight", 1_000, 1, trainable=False),
            parameter("layers.2.weight", 1_000, 2),
            parameter("layers.2.scale", 8, 2, trainable=False),
            parameter("head", 50, None).model_copy(update={"uses": used_by(OuterSection.EPILOGUE)}),
        ],
        3,
    )
    knobs = plan(small, chunk_bytes=9_000, n_buffer=2, n_checkpoint=2, max_gradient_norm=0.5, micro_batches=2)
    text = explain_plan(knobs.model_copy(update={"n_persist": 1}), small)
    assert row(text, "prologue") == ["prologue", "keep", "0", "device", "1000 B", "–", "–"]
    assert row(text, "epilogue")[:4] == ["epilogue", "keep", "3", "host, buffer 0"]
    assert row(text, "layers.2")[:4] == ["layers.2", "checkpoint", "2", "host, buffer 1"]
    # It makes room for the head at both turns, and stays from one micro-batch to the next.
    assert row(text, "1") == [
        "1", "2", "2,000", "8 KiB", "host, buffer 0", "3", "7.812 KiB", "CPU AdamW, 1,000 of them"
    ]  # fmt: skip
    assert row(text, "0")[-1] == "device AdamW"
    assert row(text, "3")[-1] == "CPU AdamW"
    unwrapped = " ".join(text.split())
    for sentence in (
        "1 of 4 chunks persistent (256 B)",
        "Activations of 3 blocks: 1 kept on the device, 2 recomputed; 2 micro-batches one after another.",
        "CPU AdamW steps 2,050 parameters after the norm of all gradients is known, device AdamW 50 at the end, "
        "1,008 are frozen.",
        "max_gradient_norm = 0.5",
    ):
        assert sentence in unwrapped


def test_the_optimizer_that_steps_is_named() -> None:
    small = chain(3)
    knobs = plan(small, n_persist=1, n_buffer=2)
    layout = build_layout(small.parameters, num_blocks=3, chunk_bytes=knobs.chunk_bytes)
    text = explain(compile_schedule(knobs, small, layout), knobs, small, layout, optimizer="SGD")
    assert [row(text, str(chunk))[-1] for chunk in range(3)] == ["device SGD", "CPU SGD", "CPU SGD"]
    assert "CPU SGD steps 2,000 parameters beside backward, as gradients arrive, device SGD 1,000 at the end" in (
        " ".join(text.split())
    )
    assert "Adam" not in text


def test_parameters_that_have_masters_are_told() -> None:
    parameters = [
        parameter("layers.0.weight", 1_000, 0, dtype="bfloat16"),
        parameter("layers.1.weight", 1_000, 1, dtype="bfloat16", trainable=False),
        parameter("layers.1.scale", 10, 1),
    ]
    small = workload(parameters, 2)
    text = " ".join(explain_plan(plan(small, n_buffer=2), small).split())
    assert "Precision: 1,000 parameters in bfloat16 are stepped as float32 masters and rounded after every step" in text
    wide = chain(2)
    assert "Precision" not in explain_plan(plan(wide, n_buffer=2), wide)


def test_what_lies_on_the_disk_is_told() -> None:
    """Two chunks of 1 000 scalars with 8 004 bytes of state, one with its 4 096 bytes of parameters there.

    That one is read twice for gathers, or once, where it stays from forward to backward, as with this buffer for each.
    """
    model = chain(3)
    on_disk = {"n_disk_state": 2, "n_disk": 1, "n_staging": 1}
    told = " ".join(explain_plan(plan(model, n_buffer=3).model_copy(update=on_disk), model).split())
    moved_bytes = 4_096 + 2 * (4_096 + 8_004) + 2 * 8_004
    for place in ("host, buffer 0", "host, state on disk, buffer 1", "disk, buffer 2"):
        assert told.count(f" {place} ") == 2, "of a block and of its chunk"
    assert f"3 chunks on the host ({format_bytes(3 * 4_096)}), 1 of them on its disk (4 KiB), gathered" in told
    assert (
        f"Disk: {format_bytes(4_096 + 2 * 8_004)}, the optimizer state of the last 2 chunks and the parameters" in told
    )
    assert f"of the last 1; {format_bytes(moved_bytes)} are read and written through 1 place of each sort" in told


def test_what_nobody_steps() -> None:
    frozen = chain(2, frozen=(0, 1))
    found = account_of(plan(frozen, n_buffer=2), frozen)
    assert {chunk.stepper for chunk in found.chunks} == {Stepper.NOBODY}
    text = explain_plan(plan(frozen, n_persist=2, n_buffer=0), frozen)
    assert "2,000 are frozen" in text
    assert "on the host" not in text


@settings(max_examples=examples(160, 16))
@given(planned_workloads())
def test_the_account_adds_up_to_the_schedule(case: PlannedWorkload) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    found = account(schedule, case.plan, case.workload, case.layout)

    def moved(*kinds: TaskKind) -> int:
        return sum(task.moved_bytes for task in schedule.tasks if task.kind in kinds)

    assert sum(chunk.gathered_bytes for chunk in found.chunks) == moved(TaskKind.GATHER)
    assert sum(chunk.gradient_bytes for chunk in found.chunks) == moved(TaskKind.GRADIENT_OFFLOAD)
    swaps = moved(TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH)
    assert sum(section.moved_bytes for section in found.sections) == swaps
    outputs = [
        buffer.size_bytes
        for buffer in schedule.buffers
        if buffer.content in (Content.OUTPUT, Content.ACTIVATIONS, Content.KEPT_RESULTS)
        and buffer.memory is Memory.DEVICE
    ]
    per_micro_batch = sum(section.kept_bytes for section in found.sections)
    recomputed = sum(section.recomputed_bytes for section in found.sections)
    assert case.plan.micro_batches * per_micro_batch + recomputed == sum(outputs)
    steppers = {chunk.chunk.id: chunk.stepper for chunk in found.chunks}
    first, kept = case.plan.n_persist, case.plan.n_persist + case.plan.n_host_stepped
    # Nobody steps what is frozen.
    persistent = {c.id for c in case.layout.chunks if c.id < first or (c.id < kept and not c.is_trainable)}
    for chunk in case.layout.chunks:
        stepped_by = Stepper.DEVICE_ADAM if chunk.id in persistent else Stepper.CPU_ADAM
        assert steppers[chunk.id] is (stepped_by if chunk.is_trainable else Stepper.NOBODY)
    assert {chunk.chunk.id for chunk in found.chunks if chunk.is_persistent} == persistent
    host_stepped = {c.id for c in case.layout.chunks if first <= c.id < kept} - persistent
    assert {chunk.chunk.id for chunk in found.chunks if chunk.is_host_stepped} == host_stepped
    assert all(slot < schedule.num_slots for chunk in found.chunks for slot in chunk.slots)
    text = explain(schedule, case.plan, case.workload, case.layout)
    for block in case.workload.blocks:
        assert block.name in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_no_torch_is_needed() -> None:
    program = "import sys, protwin.shared.tables.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=600).returncode == 0
