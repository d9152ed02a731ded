"""Thirty questions as people ask them, and what the search recommends: ``make recommendations``.

Ten models from 0.1 to 70 billion parameters, each trained in full on one device, with LoRA on one device, and in full
on eight.  The answers are printed, and written as a page of the documents: which machine to take for which model.
``tests/sim/test_recommendations.py`` holds every answer against plans that need no search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from protwin.shared.answers.search_result import SearchResult
from protwin.shared.basics.errors import PlanError
from protwin.shared.basics.units import format_bytes, format_number
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import Workload
from protwin.shared.tables.answer import lacking_words
from protwin.shared.workloads.source import load_workload
from protwin.sim.searching.request import SearchRequest, Step
from protwin.sim.searching.search import search

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "fine-tune.md"
LORA_RANK: Final = 16


@dataclass(frozen=True)
class Asked:
    """One question."""

    model: str
    machine: str
    batch_size: int = 1
    """Samples of each device at a time."""
    sequence_length: int = 2048
    is_lora: bool = False
    num_ranks: int = 1

    def __str__(self) -> str:
        ranks = f", {self.num_ranks} devices" if self.num_ranks > 1 else ""
        return f"{self.model}, {'LoRA' if self.is_lora else 'full'}, on {self.machine}{ranks}"

    def workload(self) -> Workload:
        """What is trained; with LoRA it is traced, with torch."""
        return load_workload(
            self.model,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            dtype="bfloat16",
            options=TrainingOptions(lora=LoraOptions(rank=LORA_RANK)) if self.is_lora else TrainingOptions(),
        )

    def request(self) -> SearchRequest:
        """The search, with the baselines."""
        return SearchRequest(
            workload=self.workload(),
            hardware=load_hardware(self.machine),
            step=Step(num_ranks=self.num_ranks),
            baselines=(),
        )

    def answer(self) -> SearchResult | PlanError:
        """The recommendation, or why nothing fits."""
        try:
            return search(self.request())
        except PlanError as error:
            return error


_ON_ONE: Final = (
    ("smollm2-135m", "rtx-3090", 8),
    ("qwen2.5-0.5b", "a100-80gb", 8),
    ("llama-3.2-1b", "rtx-4090", 1),
    ("qwen2.5-1.5b", "rtx-5090", 1),
    ("llama-3.2-3b", "a100-40gb", 1),
    ("mistral-7b", "a100-80gb", 1),
    ("llama-3-8b", "rtx-3090", 1),
    ("qwen2.5-14b", "h100-80gb", 1),
    ("qwen2.5-32b", "h200-141gb", 1),
    ("llama-3-70b", "h200-141gb", 1),
)
_WITH_LORA: Final = (
    ("smollm2-135m", "rtx-4090", 8),
    ("qwen2.5-0.5b", "rtx-3090", 4),
    ("llama-3.2-1b", "rtx-3090", 4),
    ("qwen2.5-1.5b", "a100-40gb", 8),
    ("llama-3.2-3b", "rtx-4090", 1),
    ("mistral-7b", "rtx-3090", 1),
    ("llama-3-8b", "rtx-5090", 1),
    ("qwen2.5-14b", "a100-40gb", 1),
    ("qwen2.5-32b", "a100-80gb", 1),
    ("llama-3-70b", "h200-141gb", 1),
)
_ON_EIGHT: Final = (
    ("smollm2-135m", "rtx-4090-x8", 8),
    ("qwen2.5-0.5b", "rtx-4090-x8", 2),
    ("llama-3.2-1b", "a100-80gb-x8", 4),
    ("qwen2.5-1.5b", "a100-80gb-x8", 4),
    ("llama-3.2-3b", "h100-80gb-x8", 4),
    ("mistral-7b", "h100-80gb-x8", 2),
    ("llama-3-8b", "a100-80gb-x8", 1),
    ("qwen2.5-14b", "h100-80gb-x8", 1),
    ("qwen2.5-32b", "mi300x-192gb-x8", 1),
    ("llama-3-70b", "mi300x-192gb-x8", 1),
)
QUESTIONS: Final = (
    *(Asked(model, machine, size) for model, machine, size in _ON_ONE),
    *(Asked(model, machine, size, is_lora=True) for model, machine, size in _WITH_LORA),
    *(Asked(model, machine, size, num_ranks=8) for model, machine, size in _ON_EIGHT),
)

_HEAD: Final = """# Which machine do I need to fine-tune ...?

<!-- Written by benchmarks/recommendations.py (make recommendations). -->

Thirty questions as people ask them, answered by `protwin search` from data sheets, without a machine. Weights are
bfloat16 with float32 masters, AdamW steps, sequences have 2,048 tokens; LoRA has rank 16 on every linear map of the
blocks. *Recommended* is the simplest plan that is worth it: a plan of a less simple kind must be faster by more than
the uncertainty of the comparison ([predictions](predictions.md)), and its memory must fit with the allocator's default
settings and 5 % of the device to spare. *Without a search* is the fastest of plain training, FSDP2 and DeepSpeed
ZeRO-3, carried out as plans on the same machine, that fits. Predictions from data sheets are too fast: by 11 % for
published runs with LoRA, 18 % for MPT on A100, 32 % on H100, and 55 % where parameters are offloaded (means, `make
published`; [Results](results.md#published-runs) has every run).
"""


def main() -> None:
    """Answer all questions, print the page and write it."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        answers = list(pool.map(Asked.answer, QUESTIONS))
    text = page(list(zip(QUESTIONS, answers, strict=True)))
    PAGE.write_text(text, encoding="utf-8")
    print(text)


def page(answered: Sequence[tuple[Asked, SearchResult | PlanError]]) -> str:
    """The page as text."""
    parts = [_HEAD]
    sections = (
        ("In full, on one device", lambda asked: asked.num_ranks == 1 and not asked.is_lora),
        ("With LoRA, on one device", lambda asked: asked.is_lora),
        ("In full, on eight devices", lambda asked: asked.num_ranks > 1),
    )
    for title, belongs in sections:
        parts += [f"## {title}", "\n".join(_rows([one for one in answered if belongs(one[0])]))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _rows(answered: Sequence[tuple[Asked, SearchResult | PlanError]]) -> Iterator[str]:
    yield (
        "| model | machine | samples a device | recommended | tokens/s | device peak | host memory | without a search |"
    )
    yield "| --- | --- | ---: | --- | ---: | ---: | ---: | --- |"
    for asked, answer in answered:
        cells = [asked.model, asked.machine, str(asked.batch_size)]
        cells += _nothing(answer) if isinstance(answer, PlanError) else _recommended(answer)
        yield f"| {' | '.join(cells)} |"


def _nothing(error: PlanError) -> list[str]:
    return [f"**nothing fits**: {str(error).split(' (chunk_bytes')[0]}", "", "", "", ""]


def _recommended(answer: SearchResult) -> list[str]:
    record = answer.prediction
    host = record.host_memory
    host_bytes = 0 if host is None else host.pinned_requested_bytes + host.state_bytes
    words = answer.plan_kind.words
    if answer.plan.n_checkpoint:
        words = f"{words}; {answer.plan.n_checkpoint} blocks checkpointed"
    return [
        words,
        format_number(record.tokens_per_s),
        format_bytes(record.guaranteed_peak_device_bytes),
        format_bytes(host_bytes) if host_bytes else "–",
        _without(answer),
    ]


def _without(answer: SearchResult) -> str:
    best = answer.best_baseline
    if best is None:
        plain = answer.baselines[0]
        return f"none fits; {plain.name} is {lacking_words(plain)}"
    return f"{best.name}: {format_number(best.tokens_per_s)} tokens/s"


if __name__ == "__main__":
    main()
