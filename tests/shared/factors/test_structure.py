"""The structure of shipped families and the hashes that follow from it."""

from __future__ import annotations

import pytest

from protwin.shared.catalogue.models import model_names
from protwin.shared.families.shipped import SHIPPED_DTYPES, shipped_family
from protwin.shared.schema.training_options import OsftOptions, TrainingOptions
from protwin.shared.workloads.source import load_workload

NAMES = model_names()


@pytest.mark.parametrize("name", [*NAMES[::9], "gpt2", "t5-small"])
def test_families_know_the_hash_that_they_were_traced_with(name: str) -> None:
    for dtype in SHIPPED_DTYPES:
        family = shipped_family(name, dtype)
        assert family is not None
        assert family.structure is not None
        assert family.structure.hash_with(family.parameters) == family.model_hash
        assert family.structure.hash_with(family.parameters[1:]) != family.model_hash
        for twin, its_hash in family.twins.items():
            assert family.structure.hash_with(family.in_dtype(twin).parameters) == its_hash


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_models_of_the_catalogue_are_factorised_without_the_tracer(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing has to be traced")

    monkeypatch.setattr("protwin.shared.workloads.source.plugin", refuse)
    options = TrainingOptions(osft=OsftOptions(unfreeze_rank_ratio=ratio))
    found = load_workload("llama-3-8b", batch_size=1, sequence_length=512, options=options)
    dense = load_workload("llama-3-8b", batch_size=1, sequence_length=512)
    scalars = sum(parameter.num_elements for parameter in found.parameters)
    # (n + m + 1) min(n, m) in place of n m, in each of 32 blocks: q and o, k and v, gate, up and down.
    of_maps = ((4096, 4096, 2), (1024, 4096, 2), (14336, 4096, 3))
    more = 32 * sum(times * ((n + m + 1) * min(n, m) - n * m) for n, m, times in of_maps)
    assert scalars - sum(parameter.num_elements for parameter in dense.parameters) == more
    assert len(found.subspaces) == (0 if ratio == 1 else 32 * 7 * 2)
    assert found.model_hash != dense.model_hash
