"""Bad input gets one message and exit code 2: no traceback, nothing on standard output, no half-written file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Protwin
from tests.cli.refusals import CALIBRATE, RUN, SEARCH, SIMULATE, refusal, replaced
from tests.proof_size import some_quick


def test_good_input_is_good(protwin_here: Protwin, folder: Path) -> None:
    """What the other tests spoil is accepted as it stands."""
    for arguments in (
        SEARCH,
        SIMULATE,
        replaced(SEARCH, "rtx-3090", "machine.toml"),
        (*SIMULATE, "--calibration", "calibration.json"),
    ):
        result = protwin_here(*arguments)
        assert result.returncode == 0, result.stderr


@some_quick(
    "arguments",
    [
        replaced(SEARCH, "workload.json", "llama-3-8"),
        replaced(SEARCH, "rtx-3090", "rtx3091"),
        replaced(SEARCH, "workload.json", "missing.json"),
        replaced(SIMULATE, "plan.json", "workload.json"),
        (*SEARCH, "--device-budget=20MiB"),
        (*SEARCH, "--batch-size=0"),
        ("hardware", "show", "rtx-3090", "--set", "device.memory_bytes=nan"),
    ],
    quick=3,
    ids=["model", "machine", "file", "kind", "budget", "number", "figure"],
)
def test_the_console_script_refuses_as_this_process_does(
    protwin: Protwin, protwin_here: Protwin, folder: Path, arguments: tuple[str, ...]
) -> None:
    """One of each sort through the real script; the other tests save themselves the start of Python."""
    assert refusal(protwin, folder, arguments) == refusal(protwin_here, folder, arguments)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "nearest"), [("llama-3-8", "llama-3-8b"), ("Llama3-8", "llama-3-8b"), ("gpt2xlarge", "gpt2-xl")]
)
def test_an_unknown_model_gets_the_nearest_names(protwin_here: Protwin, folder: Path, typed: str, nearest: str) -> None:
    assert nearest in refusal(protwin_here, folder, replaced(SEARCH, "workload.json", typed))


@pytest.mark.parametrize(
    ("typed", "nearest"), [("rtx3091", "rtx-3090"), ("h100-81gb", "h100-80gb"), ("a100-80", "a100-80gb")]
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
    assert "--device-budget" in refusal(protwin_here, folder, (*SEARCH, f"--device-budget={size}"))


@pytest.mark.parametrize(("size", "meant"), [("24", "such as 24GiB."), ("24G", "Did you mean 24GB or 24GiB?")])
def test_a_budget_without_a_whole_unit_is_asked_about(
    protwin_here: Protwin, folder: Path, size: str, meant: str
) -> None:
    """24 bytes of device memory were answered, by what a plan lacks beyond them."""
    assert meant in refusal(protwin_here, folder, (*SEARCH, f"--device-budget={size}"))


def test_a_chunk_size_must_be_one(protwin_here: Protwin, folder: Path) -> None:
    assert "--chunk-bytes" in refusal(protwin_here, folder, (*SEARCH, "--chunk-bytes=-1MiB"))


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
