"""The question that a plan answers, against what was put into the workload by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.catalogue.overrides import override_hardware
from protwin.shared.records.question import frozen_modules, question_of
from protwin.shared.schema.hardware import PROBED
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import DType, Parameter, Workload
from protwin.shared.tables.question import question_table
from protwin.shared.workloads.source import load_workload


@dataclass
class _Named:
    """A parameter of one scalar."""

    name: str
    trainable: bool

    @property
    def parameter(self) -> Parameter:
        return Parameter(name=self.name, shape=(1,), dtype=DType.FLOAT32, trainable=self.trainable)


def _plan(workload: Workload) -> Plan:
    return Plan(workload_id=workload.identity, chunk_bytes=2**20, n_persist=0, n_buffer=1, micro_batches=3)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"a.w": True, "b.w": True}, ()),
        ({"embed.w": False, "layers.0.w": True}, ("embed",)),
        (
            {"m.layers.0.w": False, "m.layers.0.b": False, "m.layers.1.w": False, "m.layers.2.w": True, "m.n": False},
            ("m.layers.0-1", "m.n"),
        ),
        ({"m.norm.weight": True, "m.norm.bias": False}, ("m.norm.bias",)),
        ({"m.9.w": False, "m.10.w": False, "m.12.w": False, "m.13.w": True}, ("m.9-10,12",)),
        (
            {f"m.{layer}.{part}.w": part == "norm" for layer in range(12) for part in ("q", "k", "norm")},
            ("m.0-11.q", "m.0-11.k"),
        ),
    ],
)
def test_frozen_modules_are_the_outermost(named: dict[str, bool], found: tuple[str, ...]) -> None:
    assert frozen_modules([_Named(name, trained).parameter for name, trained in named.items()]) == found


def test_a_full_training_of_a_catalogue_model() -> None:
    workload = load_workload("smollm2-135m", batch_size=4, sequence_length=64, dtype="bfloat16")
    asked = question_of(workload, _plan(workload))
    assert asked.num_parameters == asked.num_trained == 134_515_008  # as its model card's safetensors index counts
    assert (asked.lora_rank, asked.frozen) == (None, ())
    assert (asked.weight_dtype, asked.gradient_dtype, asked.compute_dtype) == (DType.BFLOAT16,) * 3
    assert (asked.master_dtype, asked.state_dtype, asked.is_autocast) == (DType.FLOAT32, DType.FLOAT32, False)
    assert (asked.num_samples, asked.sequence_length, asked.num_tokens) == (12, 64, 768)


def test_images_have_no_sequence() -> None:
    workload = load_workload("vit-huge", batch_size=4, dtype="bfloat16")
    asked = question_of(workload, _plan(workload))
    assert (asked.sequence_length, asked.num_tokens, asked.num_samples) == (None, None, 12)


def test_figures_that_a_probe_measured_are_no_data_sheets() -> None:
    workload = load_workload("smollm2-135m", batch_size=1, sequence_length=64, dtype="bfloat16")
    sheet = load_hardware("rtx-3090")
    device = sheet.device.model_copy(update={"source": f"{PROBED}; copies throttled"})
    probed = sheet.model_copy(update={"device": device})
    replaced = override_hardware(probed, {"device": "rtx-4090"})
    words = [
        {row[0]: row[1] for row in question_table(question_of(workload, _plan(workload), machine)).rows}["machine"]
        for machine in (sheet, probed, replaced)
    ]
    assert words[0] == "rtx-3090, by data sheets"
    assert words[1] == "rtx-3090, by what a probe measured"
    assert words[2].endswith("by data sheets")
