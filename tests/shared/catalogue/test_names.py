"""Names as people write them: what is certain resolves, what could mean two things does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.basics.errors import CatalogueError
from protwin.shared.basics.suggestions import did_you_mean
from protwin.shared.catalogue.data_files import machine_sections
from protwin.shared.catalogue.machines import cluster_names, load_hardware, machine_names, override_hardware
from protwin.shared.catalogue.models import known_model, load_model_configuration, model_configuration, model_names
from protwin.shared.catalogue.names import device_called, machine_called, model_called, written_alike
from protwin.shared.catalogue.parts import device_part, host_part, link_part
from protwin.shared.schema.workload import DType
from protwin.shared.workloads.source import load_workload

MACHINES = (*machine_names(), *cluster_names())


@st.composite
def rewritten(draw: st.DrawFn, names: tuple[str, ...]) -> tuple[str, str]:
    """A known name, and one with other case and other separators."""
    name = draw(st.sampled_from(names))
    separators = draw(
        st.lists(st.sampled_from(["-", "_", " ", ""]), min_size=name.count("-"), max_size=name.count("-"))
    )
    words = name.split("-")
    written = words[0] + "".join(separator + word for separator, word in zip(separators, words[1:], strict=True))
    return name, draw(st.sampled_from([str.upper, str.title, str.lower]))(written)


@given(rewritten(model_names()))
def test_case_and_separators_make_no_difference_to_models(pair: tuple[str, str]) -> None:
    name, written = pair
    assert model_called(written) == name


@given(rewritten(MACHINES))
def test_nor_to_machines_and_devices(pair: tuple[str, str]) -> None:
    name, written = pair
    assert machine_called(written) == name
    assert name not in machine_sections("devices") or device_called(written) == name


@given(st.sampled_from(["devices", "hosts", "links", "nodes", "networks"]), st.data())
def test_nor_to_parts(file: str, data: st.DataObject) -> None:
    known = tuple(machine_sections(file))
    name, written = data.draw(rewritten(known))
    assert written_alike(written, known) == name


@pytest.mark.parametrize("name", model_names())
def test_a_model_answers_to_its_name_on_the_hub(name: str) -> None:
    """As ``protwin models`` prints it."""
    configuration = model_configuration(name)
    match = re.search(r"config\.json of (\S+/\S+) on the Hugging Face hub", configuration.source)
    assert match is not None
    for written in (match[1], match[1].lower(), match[1].partition("/")[2]):
        assert model_configuration(written) == configuration


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama3-8b", "llama-3-8b"),
        ("LLaMA 3 8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("llama-3-405b", "llama-3.1-405b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", None),  # another vocabulary
        ("google/gemma-2-9b-it", None),  # published in another element type
        ("someone/Meta-Llama-3-8B", None),
        ("llama-3", None),
        ("llama-38b-x", None),
        ("", None),
    ],
)
def test_what_is_certain_resolves(written: str, name: str | None) -> None:
    assert model_called(written) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100 80GB", "a100-80gb"),
        ("RTX 3090", "rtx-3090"),
        ("rtx3090ti", "rtx-3090-ti"),
        ("8xH100", "h100-80gb-x8"),
        ("8 x A100 80GB", "a100-80gb-x8"),
        ("8× RTX 4090", "rtx-4090-x8"),
        ("1xH200", "h200-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("A100", None),
        ("8xA100", None),
        ("4xH100", None),
        ("V100", None),
        ("RTX", None),
        ("x8", None),
        ("-", None),
        ("", None),
    ],
)
def test_machines_as_people_and_drivers_call_them(written: str, name: str | None) -> None:
    assert machine_called(written) == name
    if name is None:
        with pytest.raises(CatalogueError, match=re.escape(f"there is no machine {written!r} in the catalogue")):
            load_hardware(written)
    else:
        assert load_hardware(written) == load_hardware(name)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("rtx-4090-x2", "Ask about 2 devices of rtx-4090-x8: --ranks 2."),
        ("2x RTX 4090", "Ask about 2 devices of rtx-4090-x8: --ranks 2."),
        ("4xH100", "Ask about 4 devices of h100-80gb-x8: --ranks 4."),
        ("rtx-3090-x2", "Ask about 2 devices of rtx-3090-x4 or rtx-3090-x2-nvlink: --ranks 2."),
        ("rtx-4090-x16", "Did you mean rtx-4090-x8"),
        ("rtx-4090-x9999999999", "Did you mean rtx-4090-x8"),
        ("x2", "None of the"),
    ],
)
def test_fewer_devices_than_a_machine_of_the_catalogue_has_are_asked_about_as_ranks_of_it(
    written: str, said: str
) -> None:
    with pytest.raises(CatalogueError, match=re.escape(said)):
        load_hardware(written)


def test_what_is_meant_gets_the_catalogue_s_name() -> None:
    assert device_part("A100 80GB") == device_part("a100-80gb")
    assert host_part("EPYC 64") == host_part("epyc-64")
    assert link_part("PCIe5 x16").host_to_device.name == "pcie5-x16"
    machine = load_hardware("rtx-3090")
    written = override_hardware(
        machine, {"device": "RTX 4090", "link": "PCIE5-x16", "device.peak_flop_per_s.bf16": "1e14"}
    )
    exact = {"device": "rtx-4090", "link": "pcie5-x16", "device.peak_flop_per_s.bfloat16": "1e14"}
    assert written == override_hardware(machine, exact)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download of a model has its own configuration; the catalogue's own names are always the catalogue's."""
    monkeypatch.chdir(tmp_path)
    config = model_configuration("gpt2").config | {"n_layer": 3}
    for name in ("Meta-Llama-3-8B", "llama-3-8b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert known_model("Meta-Llama-3-8B") is None
    assert load_model_configuration("Meta-Llama-3-8B").config["n_layer"] == 3
    assert load_model_configuration("llama-3-8b") == model_configuration("llama-3-8b")


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("torch.float32", "float32"),
    ],
)
def test_element_types_as_people_write_them(written: str, dtype: str) -> None:
    assert DType(written) is DType(dtype)
    shape: dict[str, Any] = {"batch_size": 1, "sequence_length": 64}
    assert load_workload("gpt2", dtype=written, **shape) == load_workload("gpt2", dtype=dtype, **shape)
    with pytest.raises(ValueError, match="tf32"):
        DType("tf32")


def test_an_empty_name_resembles_nothing() -> None:
    assert did_you_mean("", MACHINES) == did_you_mean(" -", model_names()) == "The name is empty."
    with pytest.raises(
        CatalogueError, match=r"there is no model '' in the catalogue\. The name is empty\. protwin models"
    ):
        model_configuration("")


def test_suggestions_leave_the_owner_out() -> None:
    with pytest.raises(CatalogueError, match=r"Did you mean .*llama-3-8b"):
        model_configuration("someone/llama-3-8b-tuned")
