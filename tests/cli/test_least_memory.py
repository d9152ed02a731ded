"""``--goal least-memory`` counts every plan that a search would find for a smaller budget."""

from __future__ import annotations

import json

from tests.cli.conftest import Protwin

ASKED = ("search", "--model=qwen2.5-0.5b", "--hardware=l4", "--batch-size=3", "--sequence-length=777", "--json")


def test_no_budget_below_the_least_is_enough(protwin_here: Protwin) -> None:
    """Tiles of the loss are among the plans: without them the least is 1.7 GiB more, where a search finds them."""
    found = json.loads(protwin_here(*ASKED, "--goal=least-memory").stdout)
    assert found["plan"]["loss_tiles"] > 1
    least_bytes = found["prediction"]["guaranteed_peak_device_bytes"]
    refused = protwin_here(*ASKED, f"--device-budget={least_bytes - 1}")
    assert refused.returncode == 2
    assert "no plan fits, for device memory is too small" in refused.stderr
    whole = json.loads(protwin_here(*ASKED, "--goal=least-memory", "--mlp-tiles=1", "--loss-tiles=1").stdout)
    assert whole["prediction"]["guaranteed_peak_device_bytes"] > least_bytes + 2**30
