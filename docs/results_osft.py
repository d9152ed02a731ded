"""The sections of docs/results.md on orthogonal subspace fine-tuning; ``results_page.py`` runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def forgetting(content: Any) -> Iterator[str]:
    """By second text: what every way forgot and learned, and whether OSFT met both targets."""
    lesson = content["lesson"]
    rates = ", ".join(f"{rate:g}" for rate in lesson["rates"])
    yield (
        f"A Llama of {lesson['configuration']['num_hidden_layers']} blocks, {lesson['first_steps']:,} steps on the "
        f"first text, {lesson['steps']} on the second. Ratio {lesson['unfreeze_rank_ratio']}; learning rates of "
        f"{rates}, each the best by validation. Held-out losses in nats per byte, mean ± standard deviation over "
        f"seeds.\n"
    )
    headings = ("way", "trained", "rates", "first text, before", "after", "forgotten", "second text, after")
    for one in content["texts"]:
        yield f"**First {one['first']}, then {one['second']}**\n"
        yield f"| {' | '.join(headings)} |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        for way, figures in one["ways"].items():
            chosen = " ".join(f"{rate:g}" for rate in figures["rates"])
            told = [_told(figures[name]) for name in ("first_before", "first_after", "forgotten", "second_after")]
            yield f"| {way} | {figures['num_trained']:,} | {chosen} | {' | '.join(told)} |"
        yield (
            f"\nOSFT forgets {_told(one['forgotten_by_osft_over_full'])} times what full fine-tuning does "
            f"({_state(one['forgets_half_at_most'])}; the target is at most half). On the second text its loss is "
            f"{_told(one['osft_less_lora_on_second'])} above LoRA's ({_state(one['learns_as_lora_does'])}; the "
            f"target is at most 0).\n"
        )


def _told(figure: Sequence[float]) -> str:
    return f"{figure[0]:.3f} ± {figure[1]:.3f}"


def _state(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def peers_of_osft(content: Any) -> Iterator[str]:
    """Per contestant, tokens per second, and its step time over the plain dense loop's."""
    yield "| contestant | how | tokens/s | plain dense loop = 1 | spread |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for one in content["contestants"]:
        if one["failure"]:
            yield f"| {one['name']} | {one['failure']} | | | |"
            continue
        ratio = "" if one["times_plain"] is None else f"{one['times_plain']:.2f}"
        yield (
            f"| {one['name']} | {one['about']} | {one['tokens_per_s']:,.0f} | {ratio} | "
            f"{one['spread_frac'] * 100:.1f} % |"
        )
    yield (
        f"\nAll train `{content['model']}`, batch size {content['batch_size']}, {content['sequence_length']} tokens, "
        f"with {content['threads_per_process']} thread per process; OSFT with ratio {content['unfreeze_rank_ratio']} "
        f"of all maps within blocks. Ratios are medians over the rounds in which both had a turn."
    )
