"""Advice about machines: ranked, resumed, and bound to the question."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from protwin.shared.advice import Advice, MachineAdvice
from protwin.shared.advice_tables import advice_tables
from protwin.shared.errors import FileError, ProtwinError
from protwin.shared.hardware import Hardware
from protwin.shared.progress import no_progress
from protwin.shared.tables import as_text
from protwin.sim.advise import Request, advise, search_machine
from tests.sim.hand_made import machine, workload

REQUEST = Request("model", 8, None, 4, None, "fingerprint")


def boxes(*names: str) -> list[Hardware]:
    return [machine(gather_s=1.0 + place).model_copy(update={"name": name}) for place, name in enumerate(names)]


class Searches:
    """Stands for searches, and notes which machines were asked about."""

    def __init__(self, fails_at: str = "") -> None:
        self.asked: list[str] = []
        self.fails_at = fails_at

    def __call__(self, request: Request, hardware: Hardware) -> MachineAdvice:
        self.asked.append(hardware.name)
        if hardware.name == self.fails_at:
            raise KeyboardInterrupt
        if hardware.name == "tiny":
            return MachineAdvice(hardware_name="tiny", price_usd_per_hour=None, reason="nothing fits")
        plan = {"workload_id": "w", "chunk_bytes": 1, "n_persist": 0, "n_buffer": 1}
        seconds = {"fast": 1.0, "slow": 3.0}.get(hardware.name, 2.0)
        return MachineAdvice.model_validate(
            {
                "hardware_name": hardware.name,
                "price_usd_per_hour": 1.0,
                "plan": plan,
                "micro_batch_size": 4,
                "iteration_s": seconds,
                "num_tokens": 32,
                "tokens_per_s": 32 / seconds,
                "usd_per_million_tokens": {"fast": 9.0, "slow": 1.0}.get(hardware.name),
                "guaranteed_peak_device_bytes": 1,
            }
        )


def ask(searches: Searches, names: tuple[str, ...], state: Path | None = None, request: Request = REQUEST) -> Advice:
    return advise(request, boxes(*names), search_one=searches, num_processes=1, state=state, on_progress=no_progress)


def test_machines_are_ranked_by_time_and_by_cost() -> None:
    advice = ask(Searches(), ("slow", "tiny", "fast", "other"))
    assert [one.hardware_name for one in advice.machines] == ["fast", "other", "slow", "tiny"]
    assert [one.hardware_name for one in advice.by_cost] == ["slow", "fast"]
    text = as_text(advice_tables(advice))
    assert "Cheapest: slow" in text
    assert "tiny" in text


def killed(request: Request, hardware: Hardware) -> MachineAdvice:
    """Stands for a search that the system ends, as it does where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_process_that_is_killed_is_told() -> None:
    with pytest.raises(ProtwinError, match=r"2 processes that search ended by itself.*--processes 1, and --state FILE"):
        advise(REQUEST, boxes("a", "b"), search_one=killed, num_processes=2, on_progress=no_progress)


def test_an_interrupted_sweep_goes_on_where_it_ended(tmp_path: Path) -> None:
    state, names = tmp_path / "state.json", ("fast", "slow", "other")
    with pytest.raises(KeyboardInterrupt):
        ask(Searches(fails_at="other"), names, state)
    searches = Searches()
    resumed = ask(searches, names, state)
    assert searches.asked == ["other"]
    assert resumed == ask(Searches(), names)


def test_a_machine_that_changed_is_asked_about_again(tmp_path: Path) -> None:
    state, searches = tmp_path / "state.json", Searches()
    ask(searches, ("fast", "slow"), state)
    ask(searches, ("slow", "fast"), state)
    assert searches.asked == ["fast", "slow", "slow", "fast"], "the two have changed their links"


def test_answers_to_another_question_are_refused(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    ask(Searches(), ("fast",), state)
    with pytest.raises(FileError, match="another question"):
        ask(Searches(), ("fast",), state, Request("model", 16, None, 4, None, "fingerprint"))
    state.write_text(state.read_text()[:-20])
    with pytest.raises(FileError, match="damaged"):
        ask(Searches(), ("fast",), state)


def test_a_machine_is_searched_over_the_sizes_of_the_micro_batch(tmp_path: Path) -> None:
    workload().save(tmp_path / "workload.json")
    box = machine().model_copy(update={"price_usd_per_hour": 2.0})
    found = search_machine(Request(str(tmp_path / "workload.json"), None, None, 2, None, ""), box)
    assert found.plan is not None
    assert found.plan.micro_batches == 2
    assert found.is_certified
    assert found.price_usd_per_hour == 2.0
    assert found.usd_per_million_tokens == pytest.approx(2.0 / 3600 * 1e6 * found.iteration_s / 4)  # type: ignore[operator]
    refused = search_machine(Request(str(tmp_path / "absent.json"), None, None, 2, None, ""), box)
    assert refused.plan is None
    assert refused.reason
