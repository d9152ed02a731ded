"""What is said of a model, and of one shape of its batch, once it was seen in both modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import nn

from ...shared.observed.assembly import TracedModel, TracedShape
from ...shared.observed.observation import Observation
from ...shared.observed.observed_inputs import ObservedInput, PhaseKey
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import OuterSection, TaskKind
from ...shared.schema.workload import BlockId
from ..model.batches import Batch, batch_shapes, batch_tensors, count_samples_and_tokens
from ..model.blocks import NamedBlock
from ..model.identity import model_hash, software_versions
from ..model.parameters import SeenUses, TracedUses, compute_dtype, describe_parameters
from ..osft.subspaces import described_subspaces
from ..quantized.states import described
from ..routing.value_dependence import ValueWatch, joined
from .block_inputs import shared_inputs, staying_inputs
from .held_tensors import held_to_the_end
from .observing import SeenIterations, most_kept_bytes

TRACED_MODES: Final = (ActivationMode.KEEP, ActivationMode.CHECKPOINT)
"""SWAP computes what KEEP does; how much of it can travel is counted along with it."""
Seen = Mapping[ActivationMode, SeenIterations]
"""The iterations of each traced mode."""


def traced_model(
    model: nn.Module,
    blocks: Sequence[NamedBlock],
    uses: TracedUses,
    *,
    name: str | None,
    traced_with: str,
    row_lookups: tuple[str, ...] = (),
) -> TracedModel:
    """What is said of a model at every shape."""
    parameters = described(model, describe_parameters(model, blocks, uses))
    parameters, subspaces = described_subspaces(model, parameters)
    return TracedModel(
        model_name=name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        model_hash=model_hash(model),
        compute_dtype=compute_dtype(parameters),
        parameters=parameters,
        subspaces=subspaces,
        block_names=tuple(block.name for block in blocks),
        stands_for=tuple(uses.stands_for),
        traced_with=traced_with,
        software=software_versions(),
        row_lookups=row_lookups,
    )


def traced_shape(model: nn.Module, batch: Batch, seen: Seen, stands_for: Sequence[int]) -> TracedShape:
    """What one iteration on a batch of this shape does."""
    num_samples, num_tokens = count_samples_and_tokens(batch, model)
    kept, again = seen[ActivationMode.KEEP], seen[ActivationMode.CHECKPOINT]
    shared = shared_inputs(kept.given, again.given, stands_for)
    held = held_to_the_end(kept.made, again.made, stands_for)
    return TracedShape(
        batch_shapes=batch_shapes(batch),
        num_samples=num_samples,
        num_tokens=num_tokens,
        resident_bytes=_resident_bytes(model, batch) + most_kept_bytes(seen.values(), stands_for),
        observed=_casts_until_backward(seen, held),
        shared_inputs=shared + held,
        staying_inputs=staying_inputs(kept.given, again.given, again.output_bytes, shared, stands_for),
    )


def join_uses(found: dict[str, SeenUses], seen: Seen) -> None:
    """Add the uses that were seen in every mode to ``found``."""
    for iterations in seen.values():
        for name, uses in iterations.uses.items():
            found.setdefault(name, SeenUses()).join(uses)


def uses_of(seen: Seen, blocks: Sequence[NamedBlock], stands_for: Sequence[int]) -> TracedUses:
    """Who used each parameter, in every mode."""
    found: dict[str, SeenUses] = {}
    join_uses(found, seen)
    return TracedUses(found, [block.name for block in blocks], stands_for)


def _resident_bytes(model: nn.Module, batch: Batch) -> int:
    """Of buffers, each once, and of the batch, each name: labels that are the inputs here come apart from a loader."""
    buffers = {id(buffer): buffer.numel() * buffer.element_size() for buffer in model.buffers()}
    return sum(buffers.values()) + sum(t.numel() * t.element_size() for t in batch_tensors(batch).values())


def _casts_until_backward(
    seen: Seen, held: Sequence[ObservedInput]
) -> dict[ActivationMode, dict[PhaseKey, Observation]]:
    """Observations in which what checkpointed blocks leave until the model's forward ends goes with their backwards.

    Autocast keeps the casts of weights until then.  Blocks in another mode have them saved for their backward, so that
    the epilogue, of which there is one for all mixtures, frees none.  Were they freed nowhere, every micro-batch would
    add them to the account once more.  What the first block reads goes in the epilogue where blocks keep what they
    save, and with that block's backward where they are checkpointed: so the first one, which stands for no other, has
    what is left.  They come in the order in which autocast let go of them, which is none.  ``held`` are those of which
    it is known who keeps them: they are shared inputs.
    """
    kept, again = (seen[mode] for mode in (ActivationMode.KEEP, ActivationMode.CHECKPOINT))
    sections = dict(again.sections)
    epilogue: PhaseKey = (TaskKind.FORWARD, OuterSection.EPILOGUE)
    more = {b: size - kept.outlived_bytes.get(b, 0) for b, size in again.outlived_bytes.items()}
    left_bytes = kept.sections[epilogue].net_bytes - sections[epilogue].net_bytes
    for given in held:
        if given.made_by is not None and given.kept[0] is TaskKind.BACKWARD:
            more[given.made_by] = more.get(given.made_by, 0) - given.size_bytes
            left_bytes -= given.size_bytes
    for block, size_bytes in sorted(more.items(), reverse=True):
        key: PhaseKey = (TaskKind.BACKWARD, BlockId(block))
        gone_bytes = max(0, min(size_bytes, left_bytes))
        sections[key] = replace(sections[key], end_bytes=sections[key].end_bytes - gone_bytes)
        left_bytes -= gone_bytes
    return {ActivationMode.KEEP: kept.sections, ActivationMode.CHECKPOINT: sections}


def values_of(seen: Seen) -> ValueWatch:
    """Which blocks' memory may depend on values, in either mode."""
    return joined(iterations.values for iterations in seen.values())
