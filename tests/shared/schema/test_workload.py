"""Workloads: identity, sums, and contradictions that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.plan_check import check_plan
from protwin.shared.schema.workload import (
    Block,
    BlockProfile,
    DType,
    Operation,
    OperationClass,
    Parameter,
    Phase,
    Workload,
)
from tests.shared.small_models import chain, parameter, phase, plan, workload
from tests.strategies.workloads import workloads


def test_element_types_have_torch_names_and_sizes() -> None:
    sizes = {dtype.value: dtype.item_bytes for dtype in DType}
    assert sizes == {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }


# -- phases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net_bytes", "curve", "peak_bytes"),
    [
        (0, (), 0),
        (-50, (), 0),
        (70, (), 70),
        (0, ((1.0, -30),), 0),
        (10, ((0.5, 90), (1.0, 10)), 90),
        (90, ((0.5, 10), (1.0, 80)), 90),
    ],
)
def test_the_peak_includes_both_ends(net_bytes: int, curve: Any, peak_bytes: int) -> None:
    assert Phase(net_bytes=net_bytes, curve=curve).peak_bytes == peak_bytes


def test_flops_count_every_call() -> None:
    matmul = Operation(
        name="aten.mm", operation_class=OperationClass.MATMUL, dtype=DType.FLOAT32, flops=10, bytes_moved=1, count=3
    )
    other = matmul.model_copy(update={"flops": 7, "count": 1})
    assert Phase(operations=(matmul, other)).flops == 37


@pytest.mark.parametrize(
    "curve",
    [
        ((0.5, 1),),
        ((0.5, 1), (0.5, 2), (1.0, 3)),
        ((0.7, 1), (0.5, 2), (1.0, 3)),
        ((0.0, 1), (1.0, 3)),
        ((1.0, 1), (1.5, 3)),
        ((float("nan"), 1), (1.0, 3)),
        ((1.0, 2**61),),
    ],
)
def test_curves_ascend_to_the_end(curve: Any) -> None:
    with pytest.raises(ValidationError):
        Phase(curve=curve)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_are_finite_and_not_negative(seconds: float) -> None:
    with pytest.raises(ValidationError):
        Phase(measured_s=seconds)


# -- identity --------------------------------------------------------------------------------------------------------


def test_the_identity_follows_what_a_plan_depends_on() -> None:
    model = chain(3)

    def with_parameter(**change: object) -> dict[str, object]:
        first = model.parameters[0].model_copy(update=change)
        return {"parameters": (first, *model.parameters[1:])}

    changes: list[dict[str, object]] = [
        {"model_hash": "another"},
        {"batch_shapes": {"input_ids": (2, 4)}},
        {"batch_shapes": {"inputs": (1, 4)}},
        {"blocks": (Block(name="other", profile=0), *model.blocks[1:])},
        with_parameter(name="other"),
        with_parameter(shape=(1, 1000)),
        with_parameter(dtype=DType.BFLOAT16),
        with_parameter(trainable=False),
        with_parameter(block=None),
    ]
    identities = [model.identity, *(model.model_copy(update=change).identity for change in changes)]
    assert len(set(identities)) == len(identities)


def test_the_identity_does_not_follow_timings_names_or_machines() -> None:
    model = chain(3)
    slower = tuple(
        profile.model_copy(update={"forward": profile.forward.model_copy(update={"measured_s": 9.0})})
        for profile in model.profiles
    )
    for change in (
        {"profiles": slower},
        {"measured_on": "another"},
        {"model_name": "another"},
        {"software": {"a": "b"}},
    ):
        assert model.model_copy(update=change).identity == model.identity
    assert chain(3).identity == model.identity


def test_a_plan_of_another_workload_is_refused() -> None:
    model, other = chain(3), chain(4)
    check_plan(plan(model), model)
    with pytest.raises(PlanError) as caught:
        check_plan(plan(other), model)
    message = str(caught.value)
    assert other.identity in message
    assert model.identity in message
    assert "input_ids [1, 4]" in message


# -- sums ------------------------------------------------------------------------------------------------------------


@given(workloads(min_parameters=0))
def test_parameters_are_counted_once(model: Workload) -> None:
    assert model.num_parameters == sum(p.size_bytes // p.dtype.item_bytes for p in model.parameters)
    assert model.num_blocks == len(model.blocks)
    for block in range(model.num_blocks):
        assert model.profile_of(block) is model.profiles[model.blocks[block].profile]


@given(workloads(measured=True))
def test_a_workload_is_measured_if_every_block_phase_is(model: Workload) -> None:
    assert model.is_measured
    for name in BlockProfile.model_fields:
        if name.endswith("_bytes") or name in ("seen", "selective"):
            continue
        profile = model.profiles[0]
        unmeasured = getattr(profile, name).model_copy(update={"measured_s": None})
        changed = (profile.model_copy(update={name: unmeasured}), *model.profiles[1:])
        assert not model.model_copy(update={"profiles": changed}).is_measured


TIED = Parameter(name="q", shape=(1,), dtype=DType.FLOAT32, aliases=("p",))


# -- contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blocks": ()}, "at least one block"),
        ({"blocks": (Block(name="a", profile=2),)}, "names profile 2 of 2"),
        ({"parameters": (parameter("p", 1, 2),)}, "names block 2 of 2"),
        ({"parameters": (parameter("p", 1, 0), parameter("p", 1, 1))}, "p occurs twice"),
        (
            {
                "parameters": (
                    parameter("p", 1, 0),
                    Parameter(name="q", shape=(1,), dtype=DType.FLOAT32, aliases=("p",)),
                )
            },
            "p occurs twice",
        ),
        ({"num_samples": 0}, "num_samples"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"batch_shapes": {"input_ids": (-1, 4)}}, "batch_shapes"),
        ({"resident_bytes": -1}, "resident_bytes"),
        ({"compute_dtype": "float31"}, "compute_dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_are_refused(change: dict[str, object], reason: str) -> None:
    model = chain(2)
    fields = {name: getattr(model, name) for name in Workload.model_fields}
    Workload(**fields)
    with pytest.raises(ValidationError, match=reason):
        Workload(**(fields | change))


def test_scalar_and_empty_parameters_have_sizes() -> None:
    assert Parameter(name="scalar", shape=(), dtype=DType.FLOAT32).size_bytes == 4
    assert Parameter(name="empty", shape=(3, 0), dtype=DType.FLOAT32).size_bytes == 0
    assert workload([parameter("p", 3, 0)], 1).num_parameters == 3
    assert phase(5).peak_bytes == 5
