"""What a misspelt name may have meant."""

from __future__ import annotations

from protwin.shared.basics.suggestions import did_you_mean


def test_a_short_list_is_shown_whole_and_a_long_one_counted() -> None:
    assert did_you_mean("zzz", ("left", "right")) == "Known are left, right."
    layers = [f"model.layers.{index}" for index in range(40)]
    shown = did_you_mean("zzz", ["model.embed_tokens", *layers, "lm_head"])
    assert shown.startswith("None of the 42 known names resembles it; the nearest are ")
    assert shown.count(",") == 2
    assert shown.endswith(".")


def test_a_name_that_resembles_one_of_a_long_list_gets_it() -> None:
    assert did_you_mean("lm_haed", [f"model.layers.{index}" for index in range(40)] + ["lm_head"]) == (
        "Did you mean lm_head?"
    )
