"""Which linear maps get low-rank matrices beside them: one rule, with and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ..basics.errors import WorkloadError
from ..basics.suggestions import did_you_mean

ADAPTED_CLASS: Final = "LowRankLinear"
"""What the class of an adapted map is called; the map itself is its part ``BASE``."""
BASE: Final = "base"
LOW_RANK_NAMES: Final = ("lora_a", "lora_b")
"""What the matrices are called: (rank, inputs) and (outputs, rank)."""
_MOST_RANK: Final = 2**16


def check_rank(rank: int) -> None:
    """Raise WorkloadError if a rank makes no sense for any map."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MOST_RANK:
        raise WorkloadError(f"the rank of LoRA is {rank!r}; it must be a whole number from 1 to {_MOST_RANK}.")


def chosen_maps(
    maps: Mapping[str, tuple[int, int]], *, rank: int, targets: Sequence[str], model_class: str
) -> list[str]:
    """The paths of the linear maps that are adapted, of ``maps`` of all blocks: (inputs, outputs) by path.

    ``targets`` are their names within a block, or the ends of them; none: all.  Raises WorkloadError if the rank makes
    no sense or a target names nothing.
    """
    check_rank(rank)
    for target in targets:
        if not any(_names_map(path, target) for path in maps):
            names = dict.fromkeys(path.rpartition(".")[2] for path in maps)
            raise WorkloadError(
                f"no linear map of a block is called {target!r}, which LoRA is to adapt. {did_you_mean(target, names)}"
            )
    chosen = [path for path in maps if not targets or any(_names_map(path, target) for target in targets)]
    if not chosen:
        raise WorkloadError(f"the blocks of {model_class} have no linear maps that LoRA could adapt.")
    # Narrow maps beside wide ones, such as the gate of experts, get the same rank, as PEFT has it.
    path = max(chosen, key=lambda each: min(maps[each]))
    num_in, num_out = maps[path]
    if rank > min(num_in, num_out):
        raise WorkloadError(
            f"the rank of LoRA is {rank} but {path} maps {num_in} to {num_out}, and no map that is adapted is larger "
            f"both ways. Lower it to {min(num_in, num_out)} at most."
        )
    return chosen


def _names_map(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")
