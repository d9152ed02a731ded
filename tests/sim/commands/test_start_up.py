"""What the first answer does not wait for: modules that a search of a saved workload has no use for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli.saved import decoder

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
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=True
    )
    return [name for name in watched if repr(name) in result.stderr]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A search of a saved workload."""
    decoder().save(tmp_path / "workload.json")
    return ["search", "--model", str(tmp_path / "workload.json"), "--hardware", "rtx-3090"]


def test_a_search_for_people_imports_no_other_command_s_modules(arguments: list[str]) -> None:
    assert imported(arguments, NEVER) == []


def test_a_search_for_programs_draws_no_tables(arguments: list[str]) -> None:
    assert imported([*arguments, "--json"], NEVER + FOR_TABLES) == []


def test_the_watch_sees_imports(arguments: list[str]) -> None:
    names = ["numpy.ma", "protwin.shared.records.comparison", "rich"]
    assert imported([*arguments, "--json"], NEVER + FOR_TABLES, extra=f"import {', '.join(names)}") == names


def test_a_command_of_ours_looks_through_no_installed_packages(arguments: list[str]) -> None:
    """Each look reads the metadata of all packages: pydantic's for plugins, and ours for other packages' commands."""
    planted = (
        "import importlib.metadata as metadata, pydantic\n"
        "metadata.entry_points = lambda **_: sys.modules.setdefault('looked', sys) and []"
    )
    told = imported([*arguments, "--json"], ("looked",), extra=planted.replace("\n", "; "))
    assert told == []
    assert imported(["--help"], ("looked",), extra=planted.replace("\n", "; ")) == ["looked"], "the watch sees looks"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not list threads")
def test_a_search_starts_no_threads_and_leaves_the_setting_alone(arguments: list[str]) -> None:
    code = (
        "import gc, os, sys\n"
        "import protwin.shared.cli.root as root\n"
        "root.root_command().get_command(None, 'search').load()\n"
        "assert 'numpy' in sys.modules\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
        "assert os.environ.get('OPENBLAS_NUM_THREADS') == {left!r}\n"
    )
    for variables, left in (({}, None), ({"OPENBLAS_NUM_THREADS": "1"}, "1")):
        settings = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key} | variables
        subprocess.run([sys.executable, "-c", code.format(left=left)], env=settings, timeout=600, check=True)


def test_collections_go_on_once_a_command_is_loaded() -> None:
    """What start-up made is left out of them."""
    code = (
        "import gc, sys\n"
        "import protwin.shared.cli.root as root\n"
        "from protwin.shared.cli.main import main\n"
        "import protwin.sim.commands.hardware as hardware\n"
        "def seen(*_, **__):\n    print(gc.isenabled(), gc.get_freeze_count() > 10_000)\n"
        "hardware.tell = seen\n"
        "sys.argv = ['protwin', 'hardware', 'show', 'rtx-3090']\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert result.stdout == "True True\n"


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
    subprocess.run([sys.executable, "-c", code], timeout=600, check=True)


def test_every_exported_name_is_found_without_torch() -> None:
    code = (
        "import sys, protwin.sim as sim\n"
        "assert sim.SearchSpace(n_swap=None).n_swap is None\n"
        "assert all(callable(getattr(sim, name)) for name in sim.__all__)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=600, check=True)
