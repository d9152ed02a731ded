"""What every test runs under: the same Hypothesis examples each time, and no GPU test without a GPU."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from pathlib import Path

import hypothesis
import pytest

from tests.proof_size import examples
from tests.quick_cases import mark_slow_cases

hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    print_blob=True,
    max_examples=examples(100, 15),
    # How long drawing takes says how busy the machine is; a deadline would too.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2_000)
"""New examples on each run: HYPOTHESIS_PROFILE=explore make test."""
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what it puts in the background deaf to interruptions, and deafness is inherited
    # by every process that a test starts in order to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_MANY_TESTS = 1_000
"""From here on a run is worth the seconds that all imports take."""


def _import_if_possible(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("protwin", "tests"):
            raise


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none; torch is asked only if such a test was collected.

    Cases that not every run tries are marked before pytest leaves out what is slow.

    [Note: The same examples each time]
    Hypothesis draws numbers that stand in the sources of imported modules too.  What was imported when a test begins
    depends on the tests before it, and these on how fast others ran.  So a run of many tests imports everything first,
    less what needs a tool that is not installed.
    """
    mark_slow_cases(items)
    if len(items) >= _MANY_TESTS:
        root = Path(__file__).parents[1]
        for folder in ("shared", "sim", "runtime", "calibration"):
            for path in sorted((root / folder).rglob("*.py")):
                if not path.stem.startswith("__"):
                    _import_if_possible(".".join(("protwin", *path.relative_to(root).with_suffix("").parts)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let no collection look at what stands when a test begins.

    [Note: Collections during tests]
    With torch and transformers imported a full collection goes through half a million objects that stay, a fifth of a
    second each, and many tests ask for one.  What no test can free is set aside; garbage is collected first, since
    nothing would find it there.
    """
    gc.collect()
    gc.freeze()
