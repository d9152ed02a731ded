"""What the first answer does not wait for: modules that a search of a saved workload has no use for."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.sim.hand_made import workload

NEVER = (
    "numpy.ma",
    "protwin.calibration",
    "protwin.runtime",
    "protwin.shared.records.comparison",
    "psutil",
    "scipy",
    "torch",
    "transformers",
)
"""Modules that take their time to import, and are another command's."""
FOR_TABLES = ("protwin.shared.tables.record", "protwin.shared.records.chrome_trace", "rich")
"""Modules that programs, which ask for JSON, have no use for."""

_WATCH = """
    import atexit, sys
    watched = {watched!r}
    atexit.register(lambda: print(sorted(name for name in watched if name in sys.modules), file=sys.stderr))
    {extra}
    from protwin.shared.cli.main import main
    sys.argv = ["protwin", *{arguments!r}]
    main()
"""


def imported(arguments: list[str], watched: tuple[str, ...], extra: str = "") -> list[str]:
    """Those of ``watched`` that the command with these arguments has imported when it ends."""
    code = textwrap.dedent(_WATCH).format(watched=watched, extra=extra, arguments=arguments)
    result = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=True
    )
    return [name for name in watched if repr(name) in result.stderr]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A search of a saved workload."""
    workload().save(tmp_path / "workload.json")
    return ["search", "--model", str(tmp_path / "workload.json"), "--hardware", "rtx-3090"]


def test_a_search_for_people_imports_no_other_command_s_modules(arguments: list[str]) -> None:
    assert imported(arguments, NEVER) == []


def test_a_search_for_programs_draws_no_tables(arguments: list[str]) -> None:
    assert imported([*arguments, "--json"], NEVER + FOR_TABLES) == []


@pytest.mark.parametrize("name", ["numpy.ma", "protwin.shared.records.comparison", "rich"])
def test_the_watch_sees_imports(arguments: list[str], name: str) -> None:
    assert imported([*arguments, "--json"], NEVER + FOR_TABLES, extra=f"import {name}") == [name]


def test_collections_go_on_after_work_without_them() -> None:
    code = (
        "import gc\n"
        "from protwin.shared.basics.gc_pause import gc_paused\n"
        "with gc_paused():\n    assert not gc.isenabled()\n"
        "assert gc.isenabled()\n"
        "gc.disable()\n"
        "with gc_paused():\n    pass\n"
        "assert not gc.isenabled()\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_every_exported_name_is_found_without_torch() -> None:
    code = (
        "import sys, protwin.sim as sim\n"
        "assert sim.SearchSpace(n_swap=None).n_swap is None\n"
        "assert all(callable(getattr(sim, name)) for name in sim.__all__)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
