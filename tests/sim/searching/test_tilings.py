"""All tilings are one space: rows of modes of several tilings are what spaces of one tiling each have."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings

from protwin.shared.compile.activation_levels import ActivationLevels
from protwin.shared.schema.workload import Tiling, Workload
from protwin.sim.bounds.exact_peaks import family_peaks
from protwin.sim.searching.problem import SearchProblem
from protwin.sim.searching.search import problems
from protwin.sim.space import tilings
from protwin.sim.space.plan_family import PlanFamily
from protwin.sim.space.prices import FloatArray
from protwin.sim.space.space import SearchSpace
from protwin.sim.space.step_spec import StepSpec
from tests.proof_size import examples
from tests.sim.brute_force import Case, cases_with_long_knobs
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import CHUNK_BYTES, machine, phase, workload


class _OtherThanAlone(AssertionError):
    """What is known of a plan among all tilings is not what is known of it among those of its own tiling."""


def _check(found: Case) -> None:
    request = fastest_request(
        workload=found.workload, hardware=found.hardware, space=found.space, step=found.asked_step
    )
    together = [one for one in problems(request) if len(one.tiles) > 1]
    for among in together:
        for tiles in among.tiles:
            _compare(among, among.in_tiles(request, (tiles,)), among.tiles.index(tiles))


def _compare(among: SearchProblem, alone: SearchProblem, tiling: int) -> None:
    modes = among.layouts[0].grid.modes
    rows = modes.rows_in(tiling)
    assert modes.tiles_of(int(rows[0])) == alone.tiles[0]
    for index, (of_all, of_one) in enumerate(zip(among.layouts, alone.layouts, strict=True)):
        prefixes = of_all.prefixes
        for row in range(len(of_all.grid.prefix)):
            for theirs, places in of_one.grid.modes.groups:
                mine, its = rows[places], modes.trips[rows[places[0]]]
                families = among.family(index, row, its), alone.family(index, row, theirs)
                pairs = [
                    (among.plan(index, row, 0, int(mine[0])), alone.plan(index, row, 0, int(places[0]))),
                    (families[0].compute_s(mine).tolist(), families[1].compute_s(places).tolist()),
                    (family_peaks(families[0], mine).tolist(), family_peaks(families[1], places).tolist()),
                    (
                        of_all.work.period_s(prefixes, mine).tolist(),
                        of_one.work.period_s(prefixes, places).tolist(),
                    ),
                    (
                        among.host_bytes(index, prefixes, its).tolist(),
                        alone.host_bytes(index, prefixes, theirs).tolist(),
                    ),
                    *(
                        (families[0].seconds(lane, 0).tolist(), families[1].seconds(lane, 0).tolist())
                        for lane in range(1, families[0].num_lanes)
                    ),
                ]
                if any(one != other for one, other in pairs):
                    raise _OtherThanAlone(pairs)


@given(cases_with_long_knobs())
@settings(max_examples=examples(200, 5), deadline=None)
def test_tilings_among_others_are_what_each_is_alone(found: Case) -> None:
    """Spaces of one tiling each, whose drafts are of the tiled workloads, are the oracle."""
    _check(found)


def _swapping(num_blocks: int = 2) -> Case:
    """Tiles change what blocks swap, what they hold and how long they take."""
    model = workload(num_blocks)
    (whole,) = model.profiles
    profiles = [
        whole.model_copy(
            update={
                "forward": phase(seconds, 1100 - less_bytes, 1500),
                "backward": phase(2, CHUNK_BYTES - 1100 + less_bytes, 700),
                "swappable_bytes": 900 - less_bytes,
            }
        )
        for seconds, less_bytes in ((1, 0), (3, 400))
    ]
    tiling = Tiling(mlp_tiles=2, modules=("mlp",), profiles=(profiles[1],), profile_of=(0,) * num_blocks)
    fields = {name: getattr(model, name) for name in Workload.model_fields}
    model = Workload(**fields | {"profiles": (profiles[0],), "tilings": (tiling,)})
    return Case(model, machine(), None, SearchSpace(n_swap=(0, 1)), StepSpec(), ())


@pytest.mark.parametrize("wrong", ["", "levels", "seconds", "copies"])
def test_rows_of_another_tiling_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "levels":
        joined = ActivationLevels.joined
        monkeypatch.setattr(ActivationLevels, "joined", lambda parts: joined([parts[0]] * len(parts)))
    elif wrong == "seconds":
        monkeypatch.setattr(PlanFamily, "_compute_s", property(_of_the_first))
    elif wrong == "copies":
        monkeypatch.setattr(tilings, "_first_alike", lambda workloads, key: (0,) * len(workloads))
    with pytest.raises(_OtherThanAlone) if wrong else nullcontext():
        _check(_swapping())


def _of_the_first(family: PlanFamily) -> FloatArray:
    seconds = family._task_s[None, :, family.lanes.tasks[0][0]]
    return np.repeat(seconds, 1 if family.section_s is None else len(family.section_s), axis=0)
