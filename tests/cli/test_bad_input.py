"""Bad input gets one message and exit code 2: no traceback, nothing on standard output, no half-written file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from protwin.shared.calibration import Calibration
from protwin.shared.machines import hardware_to_toml, machine
from protwin.shared.plan import Plan
from protwin.shared.workload import Workload
from tests.cli.conftest import Protwin
from tests.cli.saved import decoder

SEARCH = ("search", "--model", "workload.json", "--hardware", "rtx-3090", "--output", "out/plan.json")
SIMULATE = ("simulate", "--plan", "plan.json", "--model", "workload.json", "--hardware", "rtx-3090")


@pytest.fixture
def folder(work: Path) -> Path:
    """The folder that the command runs in, with one good file of each kind."""
    workload = decoder()
    workload.save(work / "workload.json")
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**26, n_persist=2, n_buffer=4)
    plan.save(work / "plan.json")
    Calibration(hardware_name="rtx-3090", machine="a machine").save(work / "calibration.json")
    (work / "machine.toml").write_text(hardware_to_toml(machine("rtx-3090")))
    return work


def refusal(protwin: Protwin, folder: Path, arguments: Iterable[str]) -> str:
    """The one message that ``arguments`` get; asserts everything that holds for all of them."""
    before = contents(folder)
    result = protwin(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert contents(folder) == before
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("Usage: ", "Try ")) and line]
    assert len(lines) == 1, result.stderr
    assert lines[0].lower().startswith("error: ")
    return lines[0]


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replaced(arguments: tuple[str, ...], old: str, new: str) -> list[str]:
    """``arguments`` with one of them exchanged."""
    assert old in arguments
    return [new if argument == old else argument for argument in arguments]


def test_good_input_is_good(protwin: Protwin, folder: Path) -> None:
    """What the other tests spoil is accepted as it stands."""
    for arguments in (
        SEARCH,
        SIMULATE,
        replaced(SEARCH, "rtx-3090", "machine.toml"),
        (*SIMULATE, "--calibration", "calibration.json"),
    ):
        result = protwin(*arguments)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        replaced(SEARCH, "workload.json", "llama-3-8"),
        replaced(SEARCH, "rtx-3090", "rtx3090"),
        replaced(SEARCH, "workload.json", "missing.json"),
        replaced(SIMULATE, "plan.json", "workload.json"),
        (*SEARCH, "--device-budget=20MiB"),
        (*SEARCH, "--batch-size=0"),
        ("hardware", "show", "rtx-3090", "--set", "device.memory_bytes=nan"),
    ],
    ids=["model", "machine", "file", "kind", "budget", "number", "figure"],
)
def test_the_console_script_refuses_as_this_process_does(
    protwin: Protwin, protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]
) -> None:
    """One of each sort through the real script; the other tests save themselves the start of Python."""
    assert refusal(protwin, folder, arguments) == refusal(protwin_here, folder, arguments)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "nearest"), [("llama-3-8", "llama-3-8b"), ("Llama3-8B", "llama-3-8b"), ("gpt2xl", "gpt2-xl")]
)
def test_an_unknown_model_gets_the_nearest_names(protwin_here: Protwin, folder: Path, typed: str, nearest: str) -> None:
    assert nearest in refusal(protwin_here, folder, replaced(SEARCH, "workload.json", typed))


@pytest.mark.parametrize(
    ("typed", "nearest"), [("rtx3090", "rtx-3090"), ("h100", "h100-80gb"), ("a100-80", "a100-80gb")]
)
def test_an_unknown_machine_gets_the_nearest_names(
    protwin_here: Protwin, folder: Path, typed: str, nearest: str
) -> None:
    assert nearest in refusal(protwin_here, folder, replaced(SEARCH, "rtx-3090", typed))
    assert nearest in refusal(protwin_here, folder, ("hardware", "show", typed))


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_no_model(protwin_here: Protwin, folder: Path, name: str) -> None:
    """The folder that the command runs in is a model only if it is named."""
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    shape = ("--batch-size", "1", "--sequence-length", "8")
    message = refusal(protwin_here, folder, (*replaced(SEARCH, "workload.json", name), *shape))
    assert "there is no model" in message


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["0", "-5", "nan", "inf", "-1GiB", "12XB", "", "0.1", "1e400"])
def test_a_size_must_be_one(protwin_here: Protwin, folder: Path, size: str) -> None:
    refusal(protwin_here, folder, (*SEARCH, f"--device-budget={size}"))


def test_a_chunk_size_must_be_one(protwin_here: Protwin, folder: Path) -> None:
    refusal(protwin_here, folder, (*SEARCH, "--chunk-bytes=-1MiB"))


@pytest.mark.parametrize(
    "option",
    [
        "--batch-size=0",
        "--batch-size=-1",
        "--batch-size=nan",
        "--batch-size=1.5",
        "--sequence-length=0",
        "--sequence-length=many",
        "--n-persist=-1",
        "--n-buffer=-1",
        "--prefetch-depth=0",
        "--n-checkpoint=-3",
        "--n-persist=100000000000000000000",
        "--n-buffer=100000000000000000000",
        "--prefetch-depth=100000000000000000000",
        "--n-checkpoint=100000000000000000000",
        "--no-such-option",
    ],
)
def test_a_number_must_be_one(protwin_here: Protwin, folder: Path, option: str) -> None:
    assert option.split("=")[0] in refusal(protwin_here, folder, (*SEARCH, option))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("host_to_device.bandwidth_bytes_per_s", value)
            for value in ("nan", "inf", "0", "-1", "-25GB/s", "fast", "")
        ),
        ("host.memory_bandwidth_bytes_per_s", "nan"),
        ("device.memory_bytes", "-24GiB"),
        ("device.memory_bytes", "nan"),
        ("device.vector_flop_per_s", "0"),
        ("device.peak_flop_per_s.bfloat16", "1e999"),
        ("host.num_cores", "0"),
    ],
)
def test_a_figure_of_a_machine_must_be_possible(protwin_here: Protwin, folder: Path, field: str, value: str) -> None:
    message = refusal(protwin_here, folder, ("hardware", "show", "rtx-3090", "--set", f"{field}={value}"))
    assert field in message


@pytest.mark.parametrize("assignment", ["device.memory_byte=1GiB", "devise.memory_bytes=1GiB", "device", "=1", ""])
def test_a_change_must_name_a_field(protwin_here: Protwin, folder: Path, assignment: str) -> None:
    refusal(protwin_here, folder, ("hardware", "show", "rtx-3090", "--set", assignment))


def test_a_field_changes_once(protwin_here: Protwin, folder: Path) -> None:
    twice = ("--set", "device.memory_bytes=40GiB", "--set", "device.memory_bytes = 48GiB")
    assert "48GiB" in refusal(protwin_here, folder, ("hardware", "show", "rtx-3090", *twice))


RUN = ("run", "--plan", "plan.json", "--workload", "workload.json", "--model", "gpt2")
CALIBRATE = ("calibrate", "--model", "gpt2", "--batch-size=1", "--sequence-length=8", "--hardware", "machine.toml")


@pytest.mark.parametrize(
    "arguments",
    [
        ("hardware", "probe", "--seconds=inf"),
        ("hardware", "probe", "--seconds=nan"),
        (*RUN, "--learning-rate=inf"),
        (*RUN, "--learning-rate=nan"),
        (*RUN, "--learning-rate=-1"),
        (*RUN, "--seed=-1"),
        (*RUN, "--seed=100000000000000000000"),
        (*RUN, "--host-to-device=nan"),
        (*CALIBRATE, "--seed=100000000000000000000"),
    ],
    ids=" ".join,
)
def test_a_number_must_be_possible(protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]) -> None:
    refusal(protwin_here, folder, arguments)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bandwidth_bytes_per_s = ", "bandwidth_bytes_per_s = nan #"),
        ("bandwidth_bytes_per_s = ", "bandwidth_bytes_per_s = inf #"),
        ("bandwidth_bytes_per_s = ", "bandwidth_bytes_per_s = 0 #"),
        ("bandwidth_bytes_per_s = ", "bandwidth_bytes_per_s = -1 #"),
        ("memory_bytes = ", "memory_bytes = 0 #"),
        ("memory_bytes = ", 'memory_bytes = "-24GiB" #'),
        ("memory_bytes = ", "memory_bytes = true #"),
        ("latency_s = ", "latency_s = -1e-6 #"),
        ("num_cores = ", "num_cores = 0 #"),
        ("schema_version = 1", "schema_version = 2"),
        ("schema_version = 1", ""),
        ('kind = "hardware"', 'kind = "plan"'),
        ("[device]", "[device"),
        ("[device]", "[gadget]"),
    ],
)
def test_a_machine_file_must_make_sense(protwin_here: Protwin, folder: Path, old: str, new: str) -> None:
    path = folder / "machine.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert "machine.toml" in refusal(protwin_here, folder, replaced(SEARCH, "rtx-3090", "machine.toml"))


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_a_budget_too_small_names_limit_shortfall_and_closest_plan(protwin_here: Protwin, folder: Path) -> None:
    message = refusal(protwin_here, folder, (*SEARCH, "--device-budget", "20MiB"))
    assert "20 MiB" in message
    assert "device" in message
    for knob in ("n_persist", "n_buffer", "n_checkpoint"):
        assert knob in message


def test_too_little_host_memory_is_named(protwin_here: Protwin, folder: Path) -> None:
    few = ("--set", "host.memory_bytes=256MiB", "--device-budget", "600MiB")
    assert "host" in refusal(protwin_here, folder, (*SEARCH, *few))


def test_a_budget_that_the_device_does_not_have_is_told(protwin_here: Protwin, folder: Path) -> None:
    for arguments in (SEARCH, SIMULATE):
        result = protwin_here(*arguments, "--device-budget=100GiB")
        assert result.returncode == 0
        assert result.stderr.startswith("warning: the device budget is 100 GiB but ")
        assert protwin_here(*arguments, "--device-budget=20GiB").stderr == ""


# -- plans -----------------------------------------------------------------------------------------------------------


def test_the_plan_of_another_workload_is_refused(protwin_here: Protwin, folder: Path) -> None:
    decoder(num_blocks=3, model_name="other").save(folder / "workload.json")
    message = refusal(protwin_here, folder, SIMULATE)
    assert "belongs to" in message
    assert decoder().identity in message


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("chunk_bytes", 0),
        ("chunk_bytes", -1),
        ("chunk_bytes", 1.5),
        ("n_persist", 10_000),
        ("n_buffer", 0),
        ("prefetch_depth", 0),
        ("n_checkpoint", 9),
        ("n_checkpoint", "many"),
        ("activation_modes", ["keep"]),
        ("activation_modes", ["swim"] * 8),
        ("no_such_knob", 1),
    ],
)
def test_a_plan_must_fit_its_workload(protwin_here: Protwin, folder: Path, knob: str, value: object) -> None:
    path = folder / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {knob: value}))
    assert knob in refusal(protwin_here, folder, SIMULATE)


# -- files -----------------------------------------------------------------------------------------------------------

KINDS = {
    "plan.json": SIMULATE,
    "workload.json": SEARCH,
    "calibration.json": (*SIMULATE, "--calibration", "calibration.json"),
}


DAMAGED = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "null": b"null",
    "number": b"7",
    "text": b'"text"',
    "bare": b"{}",
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "kind": b'{"kind": 1}',
    "missing": None,
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(pytest.param("workload.json", content, id=f"workload-{case}") for case, content in DAMAGED.items()),
        *(pytest.param("plan.json", DAMAGED[case], id=f"plan-{case}") for case in ("empty", "binary", "missing")),
        *(pytest.param("calibration.json", DAMAGED[case], id=f"calibration-{case}") for case in ("bare", "missing")),
    ],
)
def test_damaged_files_are_refused(protwin_here: Protwin, folder: Path, name: str, content: bytes | None) -> None:
    path = folder / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert name in refusal(protwin_here, folder, KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_cut_files_are_refused(protwin_here: Protwin, folder: Path, name: str) -> None:
    path = folder / name
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert "damaged" in refusal(protwin_here, folder, KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_newer_files_are_refused(protwin_here: Protwin, folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    message = refusal(protwin_here, folder, KINDS[name])
    assert "99" in message
    assert "Update protwin" in message


@pytest.mark.parametrize("name", KINDS)
def test_files_of_another_kind_are_refused(protwin_here: Protwin, folder: Path, name: str) -> None:
    foreign = "workload.json" if name == "plan.json" else "plan.json"
    (folder / name).write_bytes((folder / foreign).read_bytes())
    assert name in refusal(protwin_here, folder, KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_no_file(protwin_here: Protwin, folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    assert name in refusal(protwin_here, folder, KINDS[name])


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_tokens", 0), ("num_tokens", -1), ("blocks", []), ("resident_bytes", -1), ("resident_bytes", float("nan"))],
)
def test_a_workload_must_make_sense(protwin_here: Protwin, folder: Path, field: str, value: object) -> None:
    path = folder / "workload.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert field.removesuffix("s") in refusal(protwin_here, folder, SEARCH)


@pytest.mark.parametrize("arguments", [SEARCH, SIMULATE], ids=["search", "simulate"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("shape", [2**40, 2**40]), ("shape", [2**31, 2**30]), ("flops", 10**400), ("bytes_moved", 2**62)],
    ids=["parameters", "chunks", "arithmetic", "traffic"],
)
def test_a_workload_must_be_of_this_world(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...], name: str, value: object
) -> None:
    content = json.loads((folder / "workload.json").read_text())
    owner = content["parameters"][0] if name == "shape" else content["prologue_forward"]["operations"][0]
    owner |= {name: value}
    (folder / "workload.json").write_text(json.dumps(content))
    refusal(protwin_here, folder, arguments)


def test_the_calibration_of_another_machine_is_refused(protwin_here: Protwin, folder: Path) -> None:
    Calibration(hardware_name="h100-80gb", machine="a machine").save(folder / "calibration.json")
    assert "h100-80gb" in refusal(protwin_here, folder, (*SEARCH, "--calibration", "calibration.json"))


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_configuration_needs_a_shape(protwin_here: Protwin, folder: Path) -> None:
    message = refusal(protwin_here, folder, replaced(SEARCH, "workload.json", "gpt2"))
    assert "--batch-size" in message
    assert "--sequence-length" in message


@pytest.mark.parametrize(
    "option", ["--batch-size=3", "--sequence-length=1024", "--dtype=float32"], ids=["batch", "length", "dtype"]
)
def test_a_saved_workload_has_one_shape(protwin_here: Protwin, folder: Path, option: str) -> None:
    assert option.split("=")[0] in refusal(protwin_here, folder, (*SEARCH, option))


@pytest.mark.parametrize(
    "content",
    ["{}", '{"model_type": 3}', '{"model_type": "gpt2", "n_layer": 0}', '{"model_type": "gpt2", "n_embd": -8}'],
)
def test_a_configuration_must_describe_a_model(protwin_here: Protwin, folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    shape = ("--batch-size", "1", "--sequence-length", "8")
    refusal(protwin_here, folder, (*replaced(SEARCH, "workload.json", "config.json"), *shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "option"),
    [
        ('{"model_type": "no-such-family"}', "--sequence-length=8"),
        ('{"model_type": "gpt2", "n_embd": 65, "n_head": 2}', "--sequence-length=8"),
        ('{"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2}', "--sequence-length=1000000"),
        ('{"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2}', "--dtype=float99"),
    ],
    ids=["family", "heads", "length", "dtype"],
)
def test_what_the_model_refuses_is_told(protwin_here: Protwin, folder: Path, content: str, option: str) -> None:
    (folder / "config.json").write_text(content)
    arguments = replaced(SEARCH, "workload.json", "config.json")
    refusal(protwin_here, folder, (*arguments, "--batch-size=1", "--sequence-length=8", option))


@pytest.mark.slow
def test_an_unknown_family_gets_the_nearest_names(protwin_here: Protwin, folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mixtrall"}')
    arguments = replaced(SEARCH, "workload.json", "config.json")
    message = refusal(protwin_here, folder, (*arguments, "--batch-size=1", "--sequence-length=8"))
    assert "Did you mean mixtral" in message
    assert len(message) < 500


# -- output ----------------------------------------------------------------------------------------------------------


def test_output_that_cannot_be_written_is_refused(protwin_here: Protwin, folder: Path) -> None:
    assert "plan.json" in refusal(protwin_here, folder, replaced(SEARCH, "out/plan.json", "machine.toml/plan.json"))


def test_a_folder_is_no_output(protwin_here: Protwin, folder: Path) -> None:
    (folder / "out").mkdir()
    assert "out" in refusal(protwin_here, folder, replaced(SEARCH, "out/plan.json", "out"))


@pytest.mark.parametrize(
    "arguments",
    [
        (*SEARCH[:-1], "workload.json"),
        (*SEARCH[:-1], "./workload.json"),
        (*SIMULATE, "--output=plan.json"),
        (*SIMULATE, "--timeline=plan.json"),
        (*SIMULATE, "--output=new.json", "--timeline=out/../new.json"),
        (*SIMULATE, "--calibration=calibration.json", "--output=calibration.json"),
        ("trace", "--model=plan.json", "--batch-size=1", "--sequence-length=8", "--output=plan.json"),
        (*RUN, "--output=workload.json"),
        (*RUN, "--text=machine.toml", "--output=new.json", "--timeline=new.json"),
        (*CALIBRATE, "--output=new.json", "--workload-output=new.json"),
        ("compare", "plan.json", "workload.json", "--output=workload.json"),
    ],
    ids=" ".join,
)
def test_no_output_takes_the_place_of_another_file(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]
) -> None:
    assert "the same file" in refusal(protwin_here, folder, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        replaced(SEARCH, "out/plan.json", "plan.toml"),
        replaced(SEARCH, "out/plan.json", "machine.toml/plan.json"),
        (*SIMULATE, "--timeline=machine.toml/new.json"),
        (*RUN, "--timeline=machine.toml/new.json"),
        (*RUN, "--output=."),
        (*CALIBRATE, "--workload-output=machine.toml/new.json"),
        (*CALIBRATE, "--workload-output=new.toml"),
        ("compare", "a.json", "b.json", "--timeline=machine.toml/new.json"),
        ("hardware", "probe", "--output=machine.toml/new.toml"),
    ],
    ids=" ".join,
)
def test_every_output_is_checked_before_the_work(
    protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]
) -> None:
    """The plan and the workload are damaged, so that a command that looks at them first says so."""
    for name in ("plan.json", "workload.json"):
        (folder / name).write_text("damaged")
    message = refusal(protwin_here, folder, arguments)
    assert "is no folder" in message or "is a folder" in message or "would hold JSON" in message


def test_a_device_is_written_to(protwin: Protwin, folder: Path) -> None:
    result = protwin(*replaced(SEARCH, "out/plan.json", "/dev/stderr"))
    assert json.loads(result.stderr)["kind"] == "plan"


def test_a_refusal_leaves_the_old_output_alone(protwin_here: Protwin, folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "plan.json").write_text("an older plan")
    refusal(protwin_here, folder, (*SEARCH, "--device-budget", "20MiB"))
    assert (folder / "out" / "plan.json").read_text() == "an older plan"


def test_output_is_checked_before_the_work(protwin_here: Protwin, folder: Path) -> None:
    (folder / "workload.json").write_text("damaged")
    assert "is a folder" in refusal(protwin_here, folder, replaced(SEARCH, "out/plan.json", "."))


# -- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [SEARCH, SIMULATE], ids=["search", "simulate"])
def test_an_interruption_leaves_nothing_behind(
    folder: Path, environment: dict[str, str], arguments: tuple[str, ...]
) -> None:
    """The model is a pipe, so that the command is at work, waiting for it, when it is interrupted."""
    os.mkfifo(folder / "pipe.json")
    before = contents(folder)
    process = subprocess.Popen(
        [Path(sys.executable).with_name("protwin"), *replaced(arguments, "workload.json", "pipe.json")],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with (folder / "pipe.json").open("wb"):
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")
    assert contents(folder) == before


def test_workloads_of_these_tests_are_workloads(folder: Path) -> None:
    assert Workload.load(folder / "workload.json") == decoder()
