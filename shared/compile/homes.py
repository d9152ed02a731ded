"""The buffers that are there for good: on the device if a chunk is persistent or sharded, else on the host or its disk.

A chunk that is stepped on the host and kept on the device has those of an offloaded one, and its place on the device.
What lies on the disk passes through places of the host, which chunks share (``staging.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..drafts.program import NOT_THERE, BoolArray, BufferGroup, Draft, IntArray, Operand, spread
from ..layout.cached_keys import cached_bytes
from ..layout.keeping import AS_PLANNED, BucketStay, Keeping, list_bytes, moment_bytes, num_with_masters
from ..layout.shards import stepped_parts
from ..layout.uses import parameters_of_blocks
from ..optimizers.state import Stepped, master_bytes
from ..schema.optimizer import Optimizer
from ..schema.schedule import Content, Memory
from .chunk_facts import integers
from .family import Family

_PER_CHUNK = 8
_MOST_BUCKETS = 2
"""Their places are the first among a task's released buffers; what hooks hold comes behind them."""
_BEHIND_ALL = 2**40
"""The place of what comes behind all chunks' buffers that are there for good."""


@dataclass(frozen=True, eq=False)
class Homes:
    """(C,) each: buffers of chunks, ``NOT_THERE`` where a chunk has none."""

    parameters: IntArray
    """What Adam steps: on the host or its disk where the host steps them."""
    state: IntArray
    """Of trainable chunks."""
    paged: IntArray
    """Of chunks that are stepped on the device, moments in unified memory."""
    gradients: IntArray
    """Of trainable chunks that are gathered: where those of an offloaded one arrive on the host and are added up, or
    the rank's part of a sharded one's on the device, unless it goes with the step (``Keeping.parts_go``)."""
    arrivals: IntArray
    """Where gradients arrive beside those that they are added to: of later micro-batches, or of all where the host adds
    them up in float32."""
    rows: IntArray
    """Rows of embeddings that are looked up on the host, on their way to the device."""
    row_gradients: IntArray
    """Where their gradients arrive."""
    kept: IntArray
    """What compute reads of chunks that are not gathered: their places on the device."""


def static_bytes(family: Family, memory: Memory) -> int:
    """Bytes of ``memory`` that are there for good, what swaps left out."""
    draft = Draft()
    add_homes(family, draft)
    return sum(int(group.size_bytes.sum()) for _, group in draft.buffer_groups if group.memory is memory)


def add_homes(family: Family, draft: Draft, keeping: Keeping = AS_PLANNED) -> Homes:
    """Add the buffers of all chunks, chunk by chunk, behind module buffers and the batch."""
    facts, gathered = family.facts, family.is_gathered
    draft.buffers(BufferGroup(Content.RESIDENT, Memory.DEVICE, np.array([family.workload.resident_bytes])))
    on_device = ~family.leaves
    trained = facts.is_trainable

    def add(content: Content, number: int, sizes: IntArray, *homes: tuple[Memory, BoolArray]) -> IntArray:
        """The ``number``th buffers of the chunks that each memory has."""
        found = np.full(len(sizes), NOT_THERE)
        for memory, is_there in homes:
            chunks = np.flatnonzero(is_there)
            found[chunks] = draft.buffers(
                BufferGroup(content, memory, sizes[chunks], chunk=chunks, made_at=1 + _PER_CHUNK * chunks + number)
            )
        return found

    leaving = trained & family.leaves
    parameters = add(
        Content.PARAMETERS,
        0,
        np.where(gathered, _part_bytes(family, keeping), facts.size_bytes),
        (Memory.DEVICE, on_device),
        (Memory.PINNED_HOST, family.leaves & ~family.is_on_disk),
        (Memory.DISK, family.is_on_disk),
    )
    paged_bytes = _away_bytes(family, keeping)
    state = add(
        Content.OPTIMIZER_STATE,
        1,
        np.where(gathered, facts.part("state_bytes"), facts.state_bytes) - paged_bytes,
        (Memory.DEVICE, trained & on_device),
        (Memory.HOST, leaving & ~family.is_stepped_from_disk),
        (Memory.DISK, family.is_stepped_from_disk),
    )
    kept_bytes = facts.part("reduced_bytes" if keeping.gradients_are_whole else "gradient_bytes")
    lies_for_good = trained & gathered & on_device & (not keeping.parts_go)
    reduced = add(Content.REDUCED_GRADIENTS, 2, kept_bytes, (Memory.DEVICE, lies_for_good))
    stays = leaving & ~family.stages_gradients
    staging = add(Content.GRADIENTS, 2, facts.part("staging_bytes"), (Memory.PINNED_HOST, stays))
    arrivals = np.full(len(leaving), NOT_THERE)
    if family.step.has_arrivals:
        sent = leaving & (facts.left_by != NOT_THERE) & ~family.leaves_once
        arrivals = add(Content.ARRIVING_GRADIENTS, 3, facts.part("arrival_bytes"), (Memory.PINNED_HOST, sent))
    paged = add(Content.PAGED_STATE, 4, paged_bytes, (Memory.HOST, paged_bytes > 0))
    has_place = family.is_host_stepped | (family.is_offloaded & keeping.parts_stay)
    in_place_bytes = np.where(gathered, facts.part("parameter_bytes"), facts.size_bytes)
    places = add(Content.PARAMETERS, 5, in_place_bytes, (Memory.DEVICE, has_place))
    kept = np.where(family.is_persistent, parameters, places)
    looked_up = facts.is_looked_up
    rows, row_gradients = (
        add(content, number, facts.of_rows(name), (Memory.PINNED_HOST, is_there))
        for content, number, name, is_there in (
            (Content.LOOKED_UP_ROWS, 6, "forward_bytes", looked_up),
            (Content.ROW_GRADIENTS, 7, "gradient_bytes", looked_up & trained),
        )
    )
    _add_shared_places(family, draft)
    return Homes(parameters, state, paged, np.maximum(reduced, staging), arrivals, rows, row_gradients, kept)


def _part_bytes(family: Family, keeping: Keeping) -> IntArray:
    """(C,) parameters that a rank has of each gathered chunk, beside the whole one."""
    found = family.facts.part("parameter_bytes")
    return np.where(family.leaves, found, 0) if keeping.parts_are_within else found


def _away_bytes(family: Family, keeping: Keeping) -> IntArray:
    """(C,) state with which the device steps each chunk, and which it does not have between two steps."""
    paged = np.where(family.is_gathered, family.facts.part("paged_bytes"), family.facts.paged_bytes)
    found: IntArray = np.where(family.leaves, 0, visiting_bytes(family) if keeping.moments_visit else paged)
    return found


def visiting_bytes(family: Family) -> IntArray:
    """(C,) moments of each chunk, or of a rank's part of it."""
    return _of_stepped(family, moment_bytes)


def widened_scalars(family: Family) -> IntArray:
    """(C,) scalars of each chunk, or of a rank's part of it, of which a float32 copy is stepped."""
    return _of_stepped(family, num_with_masters)


def largest_with_master(family: Family, chunk: int) -> int:
    """Scalars of the largest parameter of a chunk of which a float32 copy is stepped; 0 without any."""
    members = (family.facts.parameters[placed.index] for placed in family.layout.chunks[chunk].parameters)
    optimizer = family.step.optimizer
    return max((p.num_elements for p in members if p.trainable and master_bytes(p.dtype, optimizer)), default=0)


def bytes_of_lists(family: Family, keeping: Keeping) -> int:
    """Bytes of all lists that one step makes, of what the device steps."""
    if not keeping.temporary_lists:
        return 0
    stepped = ~family.leaves & family.facts.is_trainable
    return keeping.temporary_lists * int(_of_stepped(family, list_bytes)[stepped].sum())


def _of_stepped(family: Family, of: Callable[[Sequence[Stepped], Optimizer], int]) -> IntArray:
    facts, optimizer = family.facts, family.step.optimizer
    numbers = np.where(family.is_gathered, facts.step.num_shards, 1)
    return integers(
        of(stepped_parts(chunk, facts.parameters, number), optimizer)
        for chunk, number in zip(family.layout.chunks, numbers.tolist(), strict=True)
    )


def kept_gradients(family: Family, draft: Draft) -> IntArray:
    """(E,) buffers of gradients that are there for good, by their place among all; ``NOT_THERE`` for others."""
    chunks, sections, sizes = family.facts.gradients
    found = np.full(len(chunks), NOT_THERE)
    if draft.keeping.keeps_gradients:
        kept = np.flatnonzero(family.is_persistent[chunks])
        found[kept] = draft.buffers(
            BufferGroup(
                Content.GRADIENTS,
                Memory.DEVICE,
                sizes[kept],
                chunk=chunks[kept],
                section=sections[kept],
                made_at=_BEHIND_ALL,
            )
        )
    return found


def add_buckets(family: Family, draft: Draft, forwards: IntArray, backwards: IntArray) -> None:
    """Add what gradients pass through, if anything is trained; (M,) each, the last forwards and the last backwards.

    It comes when backward begins: what a compute task makes counts from the task's end on.
    """
    buckets = draft.keeping.buckets
    dtype = next((p.dtype for p in family.workload.parameters if p.trainable), None)
    if buckets is None or not buckets.num_scalars or dtype is None:
        return
    micro_batch = np.arange(len(forwards))
    if buckets.stay is BucketStay.STEP:
        forwards, backwards, micro_batch = forwards[:1], backwards[-1:], micro_batch[:1]
    for number, content in enumerate((Content.BUCKET, Content.SECOND_BUCKET)[: buckets.number]):
        size_bytes = buckets.num_scalars * dtype.item_bytes
        if buckets.stay is BucketStay.GOOD:
            draft.buffers(BufferGroup(content, Memory.DEVICE, np.array([size_bytes]), made_at=_BEHIND_ALL + number))
            continue
        at = Operand.RELEASED.at(number)
        made = draft.buffers(
            BufferGroup(
                content,
                Memory.DEVICE,
                np.full(len(micro_batch), size_bytes),
                micro_batch=micro_batch,
                made_by=forwards,
                made_at=at,
                freed_by=backwards,
                freed_at=at,
            )
        )
        draft.read(backwards, made, at)


def add_held_inputs(family: Family, draft: Draft, backwards: IntArray) -> None:
    """Add what hooks hold of recomputed blocks; (M, n + 2) the backwards, from the epilogue on.

    [Note: Held inputs]
    FullyShardedDataParallel lets a frozen flat parameter go by a hook on the gradients of its unit's inputs
    (``torch/distributed/fsdp/_runtime_utils.py``: _register_post_backward_reshard_only_hook, which takes
    register_multi_grad_hook), whose handle it keeps until backward has ended.  Reentrant checkpointing around the unit
    recomputes it from detached inputs: leaves, whose accumulators the handle holds, and with them the inputs and their
    gradients.  So at the end of backward all inputs of such blocks are there, and a gradient of each.  Checkpointing
    within the unit, or that is not reentrant, leaves nothing of the kind; nor do flat parameters that are trained.

    The first block's input is the prologue's output, and the gradient of it is what the prologue's backward is given:
    both are counted there.
    """
    if not draft.keeping.holds_inputs:
        return
    workload = family.workload
    is_frozen = [any(not parameter.trainable for parameter in of) for of in parameters_of_blocks(workload)]
    is_held = family.is_checkpoint[0] & np.array(is_frozen)
    outputs = np.array([workload.profiles[block.profile].output_bytes for block in workload.blocks])
    sizes = np.zeros(len(outputs), dtype=np.int64)
    sizes[1:] += np.where(is_held[1:], outputs[:-1], 0)
    sizes[:-1] += np.where(is_held[1:], outputs[:-1], 0)
    blocks = np.flatnonzero(sizes)
    if not len(blocks):
        return
    shape = (len(backwards), len(blocks))
    at = Operand.RELEASED.at(_MOST_BUCKETS + spread(blocks, shape))
    by_block = backwards[:, ::-1]  # of the prologue, of blocks, and of the epilogue
    last = np.repeat(backwards[:, -1:], len(blocks), axis=1).ravel()
    held = draft.buffers(
        BufferGroup(
            Content.HELD_INPUT,
            Memory.DEVICE,
            spread(sizes[blocks], shape),
            section=spread(1 + blocks, shape),
            micro_batch=spread(np.arange(len(backwards))[:, None], shape),
            made_by=by_block[:, 1 + blocks].ravel(),
            made_at=at,
            freed_by=last,
            freed_at=at,
        )
    )
    draft.read(last, held, at)


def add_cached_keys(family: Family, draft: Draft, forwards: IntArray) -> None:
    """Add what a key-value cache keeps beside the blocks; (M, n + 2) the forwards, from the prologue on.

    [Note: Cached keys]
    A model that caches (``use_cache``) gives the keys and values of all blocks with its output.  Those of a block that
    keeps its activations are what attention saved, and are counted there.  Those of a block that is recomputed, or
    whose activations travel, are alive beside it: from its forward on, until the output goes.  That is when the
    epilogue's forward has ended, if the loop takes the loss alone.  A loop that holds the output
    (``Workload.keeps_outputs``) has those of the micro-batch before until then, and the new ones from then on: as many
    bytes for good.  Of blocks that keep their activations they are counted twice while backward has not come to them.
    """
    if not draft.keeping.caches_keys:
        return
    workload = family.workload
    sizes = integers(cached_bytes(workload.profiles[block.profile].forward) for block in workload.blocks)
    if workload.keeps_outputs and sizes.any():
        held = np.array([sizes.sum()])
        draft.buffers(BufferGroup(Content.CACHED_KEYS, Memory.DEVICE, held, made_at=_BEHIND_ALL + _MOST_BUCKETS))
    blocks = np.flatnonzero(np.where(family.is_checkpoint[0] | family.is_swap, sizes, 0))
    if not len(blocks):
        return
    shape = (len(forwards), len(blocks))
    at = Operand.RELEASED.at(_MOST_BUCKETS + spread(blocks, shape))
    last = np.repeat(forwards[:, -1:], len(blocks), axis=1).ravel()
    cached = draft.buffers(
        BufferGroup(
            Content.CACHED_KEYS,
            Memory.DEVICE,
            spread(sizes[blocks], shape),
            section=spread(1 + blocks, shape),
            micro_batch=spread(np.arange(len(forwards))[:, None], shape),
            made_by=forwards[:, 1 + blocks].ravel(),
            made_at=at,
            freed_by=last,
            freed_at=at,
        )
    )
    draft.read(last, cached, at)


def staged_sizes(family: Family) -> list[tuple[Content, Memory, IntArray, BoolArray]]:
    """What passes between the disk and the rest: content and memory, (C,) bytes, (C,) the chunks that have it.

    Parameters on their way to the device; parameters, optimizer state and gradients of chunks that are being stepped.
    """
    part, stepped = family.facts.part, family.is_stepped_from_disk
    return [
        (Content.PARAMETERS, Memory.PINNED_HOST, part("parameter_bytes"), family.is_on_disk),
        (Content.PARAMETERS, Memory.HOST, part("parameter_bytes"), family.is_on_disk & stepped),
        (Content.OPTIMIZER_STATE, Memory.HOST, part("state_bytes"), stepped),
        (Content.GRADIENTS, Memory.PINNED_HOST, part("staging_bytes"), family.stages_gradients),
    ]


def _add_shared_places(family: Family, draft: Draft) -> None:
    """The places of the host that chunks on the disk share: each as large as the largest that passes through."""
    if not family.num_staging:
        return
    slots = np.arange(family.num_staging)
    made_at = 1 + _PER_CHUNK * len(family.is_gathered)
    for number, (content, memory, sizes, passes) in enumerate(staged_sizes(family)):
        if passes.any():
            sizes = np.full(family.num_staging, sizes[passes].max())
            at = made_at + family.num_staging * number + slots
            draft.buffers(BufferGroup(content, memory, sizes, slot=slots, made_at=at))
