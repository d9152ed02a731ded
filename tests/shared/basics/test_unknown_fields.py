"""A misspelt field of a document is asked about by the name that it resembles, where it stands."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from protwin.shared.basics.errors import FileError, ProtwinError
from protwin.shared.catalogue.machines import hardware_to_toml, load_hardware, machine
from protwin.shared.schema.hardware import Device, Hardware, Host


def refused(path: Path) -> str:
    with pytest.raises(FileError) as error:
        Hardware.load(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "typed"),
    [("memory_bytes", "memory_byte"), ("memory_bandwidth_bytes_per_s", "memory_bandwith_bytes_per_s")],
)
def test_of_a_part(tmp_path: Path, field: str, typed: str) -> None:
    content = json.loads(machine("rtx-3090").to_json())
    content["device"][typed] = content["device"].pop(field)
    (tmp_path / "machine.json").write_text(json.dumps(content))
    assert f"device.{typed}: there is no such key" in refused(tmp_path / "machine.json")
    assert f"Did you mean {field}" in refused(tmp_path / "machine.json")


def test_of_the_whole_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text("nam = 'x'\n" + hardware_to_toml(machine("rtx-3090")))
    assert "Did you mean name" in refused(path)


def test_fields_of_other_parts_are_not_meant(tmp_path: Path) -> None:
    """The wrong variant looks among all names of the document: a host has no multiprocessors, which a device has."""
    assert "num_multiprocessors" in Device.model_fields.keys() - Host.model_fields.keys()
    content = json.loads(machine("rtx-3090").to_json())
    content["host"]["num_multiprocessor"] = 1
    (tmp_path / "machine.json").write_text(json.dumps(content))
    assert "num_multiprocessors" not in refused(tmp_path / "machine.json")
    content["device"]["num_multiprocessor"] = content["host"].pop("num_multiprocessor")
    (tmp_path / "machine.json").write_text(json.dumps(content))
    assert "Did you mean num_multiprocessors" in refused(tmp_path / "machine.json")


def test_an_unknown_field_is_told_ahead_of_what_is_missing(tmp_path: Path) -> None:
    """With a typo in a field that must be there, many are missing, and the typo is the one to know."""
    content = json.loads(machine("rtx-3090").to_json())
    content["device"] = {"memory_byts": 1}
    (tmp_path / "machine.json").write_text(json.dumps(content))
    told = refused(tmp_path / "machine.json")
    assert "inconsistent: device.memory_byts: " in told
    assert "Did you mean memory_bytes" in told
    assert "device.name: it is missing" in told


@pytest.mark.parametrize("seed", range(40))
def test_what_is_wrong_is_told_in_the_words_of_files(tmp_path: Path, seed: int) -> None:
    """The key, and what belongs there; nothing of Python's types."""
    draw = random.Random(seed)
    content = json.loads(machine("h100-80gb-x8").to_json())
    places = [(content, key) for key in content if key not in ("kind", "schema_version")]
    places += [(content[part], key) for part in ("device", "host", "node", "network") for key in content[part]]
    table, key = draw.choice(places)
    table[key] = draw.choice(["", [], {}, None, "x", True, [1], {"a": 1}, float("nan")])
    (tmp_path / "machine.json").write_text(json.dumps(content))
    told = ""
    try:
        load_hardware(tmp_path / "machine.json")
    except ProtwinError as error:
        told = str(error)
    assert not told or key in told
    assert not re.search(r"Input should|Extra inputs|Field required|tuple|dict|instance|NoneType|pydantic", told)


def test_an_unknown_field_that_resembles_none_gets_all_of_them(tmp_path: Path) -> None:
    content = json.loads(machine("rtx-3090").to_json())
    content["host"]["zork"] = 1
    (tmp_path / "machine.json").write_text(json.dumps(content))
    assert f"host.zork: there is no such key (found 1). Known are {', '.join(Host.model_fields)}." in (
        refused(tmp_path / "machine.json")
    )


def test_a_part_of_a_name_that_is_misspelt_is_meant(tmp_path: Path) -> None:
    content = json.loads(machine("rtx-3090").to_json())
    content["device"]["bandwith"] = 1
    (tmp_path / "machine.json").write_text(json.dumps(content))
    assert "Did you mean memory_bandwidth_bytes_per_s?" in refused(tmp_path / "machine.json")
