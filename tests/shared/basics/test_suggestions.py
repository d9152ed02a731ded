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


def test_a_part_of_a_name_is_near_whatever_its_length() -> None:
    """Two letters are a part of too much; the wrong variant goes by similarity alone."""
    known = ("rtx-3090", "h100-80gb-pcie-with-a-long-name-behind-it")
    assert did_you_mean("H100", known) == f"Did you mean {known[1]}?"
    assert did_you_mean("h1", known) == "Known are rtx-3090, h100-80gb-pcie-with-a-long-name-behind-it."


def test_the_nearest_name_comes_first() -> None:
    known = ("llama-3-70b", "llama-3-8b", "llama-2-7b", "gpt2")
    assert did_you_mean("llama_3_8", known) == "Did you mean llama-3-8b, llama-3-70b or llama-2-7b?"


def test_a_name_that_begins_alike_comes_before_those_that_end_alike() -> None:
    """The wrong variant, similarity alone, has three names of other families."""
    known = ("t5-large", "gpt2-large", "bert-large", "vit-huge", "llama-3-8b")
    assert did_you_mean("vit-large", known) == "Did you mean vit-huge, t5-large or gpt2-large?"
    assert did_you_mean("ViT_large", known[:3]) == "Did you mean t5-large, gpt2-large or bert-large?"
    assert did_you_mean("gpt2-larg", known) == "Did you mean gpt2-large, t5-large or bert-large?"
