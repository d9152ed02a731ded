"""Distillations that are interrupted after every step, and go on elsewhere to the same bits; what their files hold."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.checkpoints import state as state_module
from protwin.runtime.checkpoints.saved_part import SavedPart
from protwin.runtime.distillation import distil as distil_module
from protwin.runtime.distillation.learning_rate import CosineRate
from protwin.runtime.distillation.saved_student import identity_of
from protwin.runtime.offline.consolidating import consolidate
from protwin.runtime.offline.inspecting import inspect
from protwin.runtime.offline.resharding import reshard
from protwin.runtime.offline.tables import checkpoint_tables
from protwin.shared.basics.errors import FileError
from protwin.shared.basics.progress import no_progress
from protwin.shared.schema.plan import Plan
from tests.proof_size import IS_PROOF, examples, share, some_quick
from tests.runtime.distillation.cases import changed, snapshot, steps_of
from tests.runtime.distillation.distilling import CLIPPED_NORM, beginning, plan_in, random_bypass_plans, workload_of
from tests.runtime.distillation.families import GPT2, build, families

NAME = "gpt2"
STEPS = 12
MICRO_BATCHES = 3
RATE = CosineRate(1e-2, warmup_steps=3, decay_steps=10, least_frac=0.1)


def dropping(seed: int) -> nn.Module:
    """The student of GPT-2, whose dropout draws random numbers."""
    settings = GPT2 | {"n_inner": 40, "resid_pdrop": 0.2}
    return build(transformers.GPT2LMHeadModel, transformers.GPT2Config, settings, seed)


def models_of(name: str, *, seed: int | None = None) -> tuple[nn.Module, nn.Module]:
    """Teacher and student as a run begins with them; with a ``seed`` the student has all of its values otherwise."""
    teacher, student = families()[name].teacher(), dropping(1)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.normal_(generator=generator)
    return teacher, student


def plans_of(name: str) -> list[Plan]:
    """Plans of one accumulation, no two alike."""
    chosen = random_bypass_plans(name, examples(150, 60), seed=11)
    same = (MICRO_BATCHES, CLIPPED_NORM)
    return [plan for plan in chosen if (plan.micro_batches, plan.max_gradient_norm) == same][: examples(12, 5)]


class Run:
    """A run of a family, by its steps."""

    def __init__(self) -> None:
        self.losses: list[list[list[float]]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        """The student's after each step, with its ends."""


def trained(
    name: str,
    plan: Plan,
    *,
    until: int = STEPS,
    save_in: Path | None = None,
    resumed: Path | None = None,
    seed: Any = None,
) -> Run:
    """From the beginning, or from a checkpoint, to step ``until``; saved after every step ``save_in`` a folder."""
    teacher, student = models_of(name, seed=seed)
    before, run = snapshot(teacher), Run()
    steps = steps_of(families()[name], MICRO_BATCHES, STEPS)
    torch.manual_seed(3 if resumed is None else 99)
    with beginning(teacher, student, plan, workload_of(name), CpuDevice()) as training:
        begin = 0
        if resumed is not None:
            found = training.resume(resumed)
            begin = found.step
            assert found.data_position == {"next": begin}
        for step in range(begin, min(until, STEPS)):
            training.set_learning_rate(RATE.at(step + 1))
            run.losses.append([training(**batch).tolist() for batch in steps[step]])
            training.step()
            state = training.state_dict()
            run.weights.append({key: value for key, value in state.items() if key.startswith("student.")})
            if save_in is not None:
                training.save(save_in / str(step + 1), data_position={"next": step + 1})
    assert changed(teacher, before) == []
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """An uninterrupted run, and a checkpoint of each of its steps."""
    folder = tmp_path_factory.mktemp("steps")
    return trained(NAME, plans_of(NAME)[0], save_in=folder), folder


def is_as(whole: Run, found: Run, begin: int) -> bool:
    """Whether a run that went on after step ``begin`` is, bit for bit, the part of the whole one."""
    end = begin + len(found.losses)
    return found.losses == whole.losses[begin:end] and all(
        torch.equal(value, after[key])
        for before, after in zip(whole.weights[begin:end], found.weights, strict=True)
        for key, value in before.items()
    )


def test_interrupted_after_any_step(whole: tuple[Run, Path]) -> None:
    """Accumulation 3, another plan each time; the student drops values, and its rate follows a cosine."""
    run, folder = whole
    plans = plans_of(NAME)
    for step in sorted({*share(range(1, STEPS), 3), STEPS // 2}):
        plan = plans[step % len(plans)]
        until = STEPS if IS_PROOF or step == STEPS // 2 else step + 1
        found = trained(NAME, plan, resumed=folder / str(step), seed=step, until=until)
        assert is_as(run, found, step), (step, plan)


@some_quick(
    "variant",
    [
        (state_module, "set_random_states", lambda *_: None),
        (state_module.CheckpointState, "_outside", lambda self, names: []),
        (state_module.OptimizerState, "place", lambda self, saved: None),
    ],
    ids=["random states", "ends", "the optimizer"],
    quick=1,
)
def test_what_is_not_resumed_shows(variant: Any, whole: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = whole
    monkeypatch.setattr(*variant)
    assert not is_as(run, trained(NAME, plans_of(NAME)[1], resumed=folder / "10", seed=1, until=11), 10)


# -- what the files hold ---------------------------------------------------------------------------------------------


def saved_after_two(name: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    """Both models after two steps; the checkpoint is of then."""
    family = families()[name]
    teacher, student = family.teacher(), family.student()
    with beginning(teacher, student, plan_in(name, "mixed"), workload_of(name), CpuDevice()) as training:
        for (batch,) in steps_of(family, 1, 2):
            training(**batch)
            training.step()
        training.save(folder)
    return teacher, student


def test_the_student_alone_is_saved_and_loads(tmp_path: Path) -> None:
    _, student = saved_after_two("mistral", tmp_path / "saved")
    held = load_file(tmp_path / "saved" / "model.safetensors")
    assert held.keys() == dict(student.named_parameters()).keys()
    reshard(tmp_path / "saved", tmp_path / "two", 2, on_progress=no_progress)
    reshard(tmp_path / "two", tmp_path / "one", 1, on_progress=no_progress)
    consolidate(tmp_path / "two", tmp_path / "model", max_shard_bytes=9_000, on_progress=no_progress)
    for folder in ("saved", "one", "model"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert changed(loaded, snapshot(student)) == []
        assert loaded.config.use_cache
    report = inspect(tmp_path / "two", on_progress=no_progress)
    assert report.left_out is not None
    assert "the teacher's weights" in str(checkpoint_tables(report))
    assert report.weight_bytes == sum(parameter.nbytes for parameter in student.parameters())
    teacher, again = families()["mistral"].teacher(), families()["mistral"].student()
    with beginning(teacher, again, plan_in("mistral", "offloaded"), workload_of("mistral"), CpuDevice()) as training:
        assert training.resume(tmp_path / "two").step == 2
    assert changed(again, snapshot(student)) == []


def test_a_student_of_uneven_blocks_has_no_configuration(tmp_path: Path) -> None:
    """``from_pretrained`` would take its weights, with random ones in the place of what is absent."""
    _, student = saved_after_two("llama", tmp_path / "saved")
    assert not (tmp_path / "saved" / "config.json").exists()
    (file,) = consolidate(tmp_path / "saved", tmp_path / "model", max_shard_bytes=2**30, on_progress=no_progress)
    held = load_file(file)
    assert held.keys() == dict(student.named_parameters()).keys()
    assert all(torch.equal(value, held[name]) for name, value in student.named_parameters())


def test_a_tied_head_is_saved_once(tmp_path: Path) -> None:
    _, student = saved_after_two("gpt2", tmp_path / "saved")
    held = load_file(tmp_path / "saved" / "model.safetensors")
    assert "lm_head.weight" not in held
    assert torch.equal(held["transformer.wte.weight"], student.lm_head.weight)


def test_checkpoints_that_hold_the_teacher_still_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(distil_module, "saved_student", lambda *_: SavedPart(None))
        _, student = saved_after_two("llama", tmp_path / "saved")
    assert "teacher.model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    assert "left_out" not in json.loads((tmp_path / "saved" / "checkpoint.json").read_text())
    teacher, again = families()["llama"].teacher(), families()["llama"].student()
    before = snapshot(teacher)
    with beginning(teacher, again, plan_in("llama", "offloaded"), workload_of("llama"), CpuDevice()) as training:
        assert training.resume(tmp_path / "saved").step == 2
    assert changed(again, snapshot(student)) == []
    assert changed(teacher, before) == []


@pytest.mark.parametrize("end", ["lm_head.weight", "model.layers.2.mlp.down_proj.weight"])
def test_another_teacher_is_refused(end: str, tmp_path: Path) -> None:
    saved_after_two("llama", tmp_path / "saved")
    teacher, student = families()["llama"].teacher(), families()["llama"].student()
    with torch.no_grad():
        teacher.get_parameter(end)[3, 5] += 1e-3
    before = snapshot(student)
    with beginning(teacher, student, plan_in("llama", "mixed"), workload_of("llama"), CpuDevice()) as training:
        with pytest.raises(FileError, match=r"saved beside another teacher: its weights differ \(identity"):
            training.resume(tmp_path / "saved")
        assert training.num_steps == 0
    assert changed(student, before) == []


def test_the_identity_is_that_of_the_values() -> None:
    """Large tensors are sampled; where they lie, or how, does not matter."""
    make = partial(nn.Linear, 300, 400)
    torch.manual_seed(0)
    one = make()
    other = make()
    other.load_state_dict(one.state_dict())
    assert identity_of(one) == identity_of(other)
    with torch.no_grad():
        other.bias[7] += 1
    assert identity_of(one) != identity_of(other)
    with torch.no_grad():
        other.bias[7] = one.bias[7]
        other.weight.mul_(1.001)
    assert identity_of(one) != identity_of(other)
    assert identity_of(one) != identity_of(one.to(torch.bfloat16))
