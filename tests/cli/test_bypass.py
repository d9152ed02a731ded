"""``protwin bypass`` as a user calls it: bad input costs nothing, and leaves everything as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from protwin.runtime.bypass.teacher import TeacherFolder
from protwin.runtime.distillation.configurations import distillation_of_configuration
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.plan import Plan
from protwin.shared.students.student import Student
from tests.cli.conftest import Protwin
from tests.runtime.bypass.small_runs import save_teacher
from tests.runtime.distillation.cases import quiet

STUDENT = 'kind = "student"\nschema_version = 1\nkeys_to_learn = ["subblock_ffn"]\n\n[all]\nintermediate_size = 24\n'
OPTIONS = (
    *("--teacher", "teacher", "--student", "student.toml", "--data", "text.txt", "--plan", "plan.json"),
    *("--output", "run", "--byte-tokens", "--batch-size", "2", "--sequence-length", "8", "--tokens", "96"),
    *("--validation-batches", "1"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a student's file, a text and a plan."""
    folder = tmp_path_factory.mktemp("bypass")
    save_teacher(folder / "teacher")
    (folder / "student.toml").write_text(STUDENT)
    (folder / "text.txt").write_bytes(bytes(np.random.default_rng(2).integers(0, 64, 400).astype(np.uint8)))
    opened = TeacherFolder.opened(folder / "teacher")
    with quiet():
        workload = distillation_of_configuration(
            opened.stored,
            student=Student.load(folder / "student.toml"),
            name=opened.name,
            batch_size=2,
            sequence_length=8,
            device_kind=DeviceKind.CPU,
        )
    plan = Plan(
        workload_id=workload.identity, method="bypass", chunk_bytes=4096, n_persist=1, n_buffer=8, prefetch_depth=2
    )
    plan.save(folder / "plan.json")
    return folder


@pytest.fixture
def run(protwin_here: Protwin, work: Path, made: Path) -> Callable[..., Any]:
    """The command with its usual options, which others may follow, in a folder with all that it needs."""
    shutil.copytree(made, work, dirs_exist_ok=True)

    def called(*further: str) -> Any:
        options = [option for option in OPTIONS if option != "--byte-tokens" or "--tokenizer" not in further]
        return protwin_here("bypass", *options, *further)

    return called


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def without_weights(work: Path) -> None:
    (work / "teacher" / "model.safetensors").unlink()


def other_weights(work: Path) -> None:
    path = work / "teacher" / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def with_large_tokenizer(work: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(70)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w1")
    made.save_pretrained(work / "words")


def with_code(work: Path, named: str = "modeling_mine.Mine") -> None:
    path = work / "teacher" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": named}}))
    (work / "teacher" / "modeling_mine.py").write_text("open('it-ran', 'w').close()\n")


def with_code_elsewhere(work: Path) -> None:
    with_code(work, "../modeling_mine.Mine")


def student(old: str, new: str) -> Callable[[Path], None]:
    return lambda work: edit(work / "student.toml", old, new)


def nothing(work: Path) -> None:
    """All is as it should be but for the options."""


def with_notes(work: Path) -> None:
    (work / "run").mkdir()
    (work / "run" / "notes").write_text("mine")


def write_sweep(work: Path, text: str) -> None:
    (work / "sweep.toml").write_text(f"{text}\n")


def sweep(work: Path, *entries: str) -> None:
    write_sweep(work, "\n".join(f"[[run]]\n{entry}" for entry in entries))


FFN = '["subblock_ffn"]'
BAD: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "an unknown key": (student(FFN, '["subblock_fnn"]'), (), "there is no key to learn 'subblock_fnn'"),
    "entire_block beside others": (student(FFN, '["entire_block", "subblock_ffn"]'), (), "entire_block holds"),
    "another number of blocks": (student("[all]", "[all]\nnum_hidden_layers = 3"), (), "as many blocks as its teacher"),
    "a block that is not there": (student("[all]", "[block.2]"), (), "block 2"),
    "heads that do not divide": (student("[all]", "[all]\nnum_key_value_heads = 3"), (), "3"),
    "nothing to learn": (student(FFN, '["subblock_mamba"]'), (), "subblock_mamba"),
    "no weights": (without_weights, (), "holds neither model.safetensors nor"),
    "no teacher": (nothing, ("--teacher", "nobody"), "nobody"),
    "a tokenizer with more tokens": (with_large_tokenizer, ("--tokenizer", "words"), "has 70 tokens, but the model"),
    "no tokenizer": (nothing, ("--tokenizer", "."), "holds no tokenizer"),
    "another batch": (nothing, ("--batch-size", "1"), "plan"),
    "other micro-batches": (nothing, ("--micro-batches", "2"), "--micro-batches 2, and the plan 1"),
    "too little text": (nothing, ("--validation-batches", "100"), "held out to validate"),
    "no data": (nothing, ("--data", "nowhere.txt"), "nowhere.txt"),
    "plan and machine": (nothing, ("--hardware", "rtx-4090"), "both are given"),
    "a folder of something else": (with_notes, (), "holds notes and no run"),
    "a sweep of the data": (lambda work: sweep(work, "sequence_length = 4"), ("--sweep", "sweep.toml"), "sequence_l"),
    "no sweep": (lambda work: write_sweep(work, "a = 1"), ("--sweep", "sweep.toml"), "is no sweep"),
    "a narrow autocast": (nothing, ("--autocast", "float16"), "Give bfloat16"),
    "a rate that is none": (nothing, ("--learning-rate", "-1"), "the rate positive"),
    "code of the teacher's own": (with_code, (), "code of its own: modeling_mine.py. It did not run"),
    "code of somebody else": (with_code_elsewhere, ("--trust-remote-code",), "is no class of a file in that folder"),
    "a sweep's student": (
        lambda work: sweep(work, "student.all.intermediate_size = 96"),
        ("--sweep", "sweep.toml"),
        "96",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_nothing_is_written(run: Callable[..., Any], work: Path, name: str) -> None:
    prepare, options, expected = BAD[name]
    prepare(work)
    before = content(work)
    ended = run(*options)
    assert ended.returncode == 2, ended.stderr
    assert expected in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert content(work) == before


def test_a_run_is_trained_saved_and_not_run_again(run: Callable[..., Any], work: Path) -> None:
    first = run("--validate-every", "2")
    assert first.returncode == 0, first.stderr
    assert "language-model loss of the student" in first.stdout
    (model,) = (work / "run").glob("model-*")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.config.intermediate_size == 24
    assert json.loads(run("--validate-every", "2", "--json").stdout)["model"] == model.name
    before = content(work / "run")
    again = run("--validate-every", "2")
    assert again.returncode == 0
    assert again.stdout == f"run is complete: the student is in {Path('run') / model.name}\n"
    assert content(work / "run") == before
    # Its weights, its data and its seed are what it follows from.
    for options, told in ((("--seed", "1"), "its seed is 0 and not 1"), (("--sequence-length", "4"), "")):
        other = run("--validate-every", "2", *options)
        assert other.returncode == 2
        assert told in other.stderr
    other_weights(work)
    changed = run("--validate-every", "2")
    assert changed.returncode == 2
    assert "run holds another run: its teacher_weights is" in changed.stderr
    assert content(work / "run") == before
    # More tokens go on with it.
    shutil.rmtree(work / "teacher")
    save_teacher(work / "teacher")
    longer = run("--validate-every", "2", "--tokens", "128")
    assert longer.returncode == 0, longer.stderr
    assert "goes on after step 6" in longer.stdout
    state = json.loads((work / "run" / "run.json").read_text())
    assert (work / "run" / state["model"] / "config.json").is_file()


def test_a_complete_run_is_told_of_by_its_files_alone(run: Callable[..., Any], protwin: Protwin, work: Path) -> None:
    """Where torch and transformers cannot even be imported."""
    first = run()
    assert first.returncode == 0, first.stderr
    for package in ("torch", "transformers", "safetensors"):
        (work / "broken" / package).mkdir(parents=True)
        (work / "broken" / package / "__init__.py").write_text(f"raise SystemExit('{package} is imported')\n")
    before = content(work / "run")
    again = protwin("bypass", *OPTIONS, PYTHONPATH=str(work / "broken"))
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith("run is complete: the student is in run/model-")
    assert json.loads(protwin("bypass", *OPTIONS, "--json", PYTHONPATH=str(work / "broken")).stdout)["model"]
    assert content(work / "run") == before
    other_weights(work)
    assert "is imported" in protwin("bypass", *OPTIONS, PYTHONPATH=str(work / "broken")).stderr


def test_runs_of_a_sweep_do_not_touch_each_other(run: Callable[..., Any], work: Path) -> None:
    sweep(work, "learning_rate = 1e-3", "learning_rate = 2e-3", "seed = 4")
    whole = run("--output", "runs", "--sweep", "sweep.toml")
    assert whole.returncode == 0, whole.stderr
    folders = sorted((work / "runs").iterdir())
    assert len(folders) == 3
    before = {folder.name: content(folder) for folder in folders}
    # Alone, each gives the same.
    shutil.rmtree(folders[1])
    again = run("--output", "runs", "--sweep", "sweep.toml")
    assert again.stdout.count("is complete") == 2
    for folder in folders:
        weights = {name: held for name, held in content(folder).items() if name.endswith("model.safetensors")}
        assert weights == {name: held for name, held in before[folder.name].items() if name in weights}
