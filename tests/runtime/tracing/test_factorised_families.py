"""Models of the catalogue with factorised maps, derived without a trace, equal traces of the factorised models."""

from __future__ import annotations

import random

import pytest

from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.factors import sections
from protwin.shared.factors.sections import Freed
from protwin.shared.families.shipped import shipped_family
from protwin.shared.schema.training_options import OsftOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.workloads.factorised import factorised_workload

SMALL = ("gpt2", "smollm2-135m", "t5-small", "qwen2.5-0.5b", "qwen3-0.6b", "bert-large", "opt-1.3b", "vit-huge")
"""One of each way of making blocks."""


def derived(name: str, dtype: DType, osft: OsftOptions, shape: tuple[int, int | None]) -> Workload | None:
    family = shipped_family(name, dtype)
    assert family is not None, f"{name} is not shipped in {dtype}"
    return factorised_workload(family, osft, batch_size=shape[0], sequence_length=shape[1])


def traced(name: str, dtype: DType, osft: OsftOptions, shape: tuple[int, int | None]) -> Workload:
    return workload_of_configuration(
        model_configuration(name).config,
        name=name,
        dtype=dtype,
        batch_size=shape[0],
        sequence_length=shape[1],
        options=TrainingOptions(osft=osft),
    )


def check(name: str, dtype: DType, osft: OsftOptions, shape: tuple[int, int | None]) -> None:
    found = derived(name, dtype, osft, shape)
    assert found is not None, f"{name} takes a trace"
    expected = traced(name, dtype, osft, shape)
    assert found.to_json() == expected.model_copy(update={"software": found.software}).to_json()


def drawn(chooser: random.Random, name: str) -> tuple[DType, float, tuple[int, int | None]]:
    dtype = chooser.choice([DType.BFLOAT16, DType.FLOAT32])
    ratio = chooser.choice([0.0, 1.0, *(round(chooser.uniform(0.001, 0.95), 3) for _ in range(4))])
    length = None if name.startswith("vit") else chooser.randint(3, 300)
    return dtype, ratio, (chooser.choice([1, 2, 5]), length)


def test_the_smallest_model_in_factors_equals_its_trace() -> None:
    check("gpt2", DType.BFLOAT16, OsftOptions(unfreeze_rank_ratio=0.3), (2, 33))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", range(3))
def test_small_models_in_factors_equal_their_traces(name: str, seed: int) -> None:
    dtype, ratio, shape = drawn(random.Random(f"{name}{seed}"), name)
    check(name, dtype, OsftOptions(unfreeze_rank_ratio=ratio), shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", model_names())
def test_all_models_in_factors_equal_their_traces(name: str) -> None:
    dtype, ratio, shape = drawn(random.Random(name), name)
    check(name, dtype, OsftOptions(unfreeze_rank_ratio=ratio), shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("smollm2-135m", ("q_proj", "model.layers.[0-3].mlp.*")),
        ("smollm2-135m", ("model.layers.1?.*",)),
        ("gpt2", ("c_proj",)),
        ("bert-large", ("intermediate.dense",)),
    ],
)
def test_named_maps_alone_are_in_factors(name: str, targets: tuple[str, ...]) -> None:
    check(name, DType.BFLOAT16, OsftOptions(unfreeze_rank_ratio=0.4, targets=targets), (2, 50))


@pytest.mark.parametrize("target", ["q_prjo", "h.0.attn.c_atn"])
def test_what_no_map_is_called_is_refused_as_by_a_trace(target: str) -> None:
    osft = OsftOptions(unfreeze_rank_ratio=0.3, targets=(target,))
    with pytest.raises(WorkloadError) as without:
        derived("gpt2", DType.BFLOAT16, osft, (1, 8))
    with pytest.raises(WorkloadError) as with_torch:
        traced("gpt2", DType.BFLOAT16, osft, (1, 8))
    assert str(without.value) == str(with_torch.value)


@pytest.mark.parametrize("target", ["lm_head", "wte", "c_proj.weight", "transformer"])
def test_what_is_no_map_of_a_block_takes_a_trace(target: str) -> None:
    assert derived("gpt2", DType.BFLOAT16, OsftOptions(unfreeze_rank_ratio=0.3, targets=(target,)), (1, 8)) is None


def test_gradients_of_outputs_that_others_hold_are_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: were all of them freed at once, levels within backwards would differ."""
    osft, shape = OsftOptions(unfreeze_rank_ratio=0.3), (2, 64)
    right = derived("smollm2-135m", DType.BFLOAT16, osft, shape)
    monkeypatch.setattr("protwin.shared.workloads.factorised.freed_behind", lambda *_, **__: Freed(True, True))
    wrong = derived("smollm2-135m", DType.BFLOAT16, osft, shape)
    assert right is not None
    assert wrong is not None
    assert right.profiles[0].backward.net_bytes == wrong.profiles[0].backward.net_bytes
    assert right.profiles[0].backward.curve != wrong.profiles[0].backward.curve


def test_a_forward_that_records_keeps_its_trained_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    osft, shape = OsftOptions(unfreeze_rank_ratio=0.5), (2, 64)
    right = derived("gpt2", DType.FLOAT32, osft, shape)
    assert right is not None
    monkeypatch.setattr(sections, "_is_recorded", lambda *_: False)
    wrong = derived("gpt2", DType.FLOAT32, osft, shape)
    assert wrong is not None
    # Four maps of 768 directions, of which half are trained, each keep (128, 384) two times.
    assert right.profiles[0].forward.net_bytes - wrong.profiles[0].forward.net_bytes == 4 * 2 * 128 * 384 * 4
