"""Plans, workloads, machines and models from files that are damaged, foreign or impossible: one message each."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from protwin.shared.schema.calibration import Calibration
from tests.cli.conftest import Protwin
from tests.cli.refusals import SEARCH, SIMULATE, refusal, replaced
from tests.cli.saved import decoder


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


@pytest.mark.parametrize("written", ["plan.json", "machine.toml", "settings.json", "settings.toml", "settings.yml"])
@pytest.mark.parametrize(
    ("value", "told"), [("1" * 5_000, "a number has more than 4,300 digits"), ("[" * 100_000, "nest")]
)
def test_what_python_cannot_read_is_told_in_words_of_files(
    protwin_here: Protwin, folder: Path, written: str, value: str, told: str
) -> None:
    """Whoever reads the file: it was ``Exceeds the limit ...; use sys.set_int_max_str_digits()``."""
    form = {".json": '{{"lr": {}'.format, ".toml": "lr = {}".format, ".yml": "lr: {}".format}[Path(written).suffix]
    end = "}" if written.endswith(".json") and value.isdecimal() else ""
    (folder / written).write_text(form(value) + end)
    reading = {"plan.json": SIMULATE, "machine.toml": replaced(SEARCH, "rtx-3090", "machine.toml")}
    message = refusal(protwin_here, folder, reading.get(written, ("explain-config", written, "--hardware=t4")))
    assert written in message
    assert told in message


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


TRAININGS = {
    "--lora-rank": "8",
    "--quantize": "nf4",
    "--unfreeze-rank-ratio": "0.5",
    "--freeze": "embedding",
    "--image-size": "8x8",
    "--images": "2",
    "--autocast": "bfloat16",
    "--kernels": "mamba-ssm",
}


@pytest.mark.parametrize("seed", range(6))
def test_a_saved_workload_has_one_training(protwin_here: Protwin, folder: Path, seed: int) -> None:
    """What was asked for is named, and no option that nobody gave."""
    draw = random.Random(seed)
    given = draw.sample(sorted(TRAININGS), draw.choice([1, 1, 2]))
    given = [*given, "--lora-rank"] if "--quantize" in given and "--lora-rank" not in given else given
    said = [f"{option}={TRAININGS[option]}" for option in given]
    message = refusal(protwin_here, folder, (*SEARCH, *said))
    assert "traced as it was to be trained" in message
    named = {option for option in TRAININGS if f"{option} " in message.replace(",", " ")}
    assert named == set(given) - ({"--images"} if "--image-size" in given else set()), message


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
