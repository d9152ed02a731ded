"""A small workload whose prologue may look rows up: a table that the epilogue uses too, and one for itself."""

from __future__ import annotations

from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import (
    DType,
    LookedUpTable,
    OuterSection,
    Parameter,
    RowLookups,
    Uses,
    Workload,
)
from tests.shared.small_models import OUTPUT_BYTES, parameter, phase, workload
from tests.strategies.plans import PlannedWorkload

PROLOGUE, EPILOGUE = OuterSection.PROLOGUE, OuterSection.EPILOGUE
WIDTH = 8
NUM_WORDS, WORD_ROWS = 100, 12
NUM_PLACES, PLACE_ROWS = 40, 6
ROW_BYTES = 4 * WIDTH
CHUNK_BYTES = 4_096


def table(name: str, rows: int, *, is_tied: bool, trainable: bool = True) -> Parameter:
    uses = Uses(
        forward=(PROLOGUE, EPILOGUE) if is_tied else (PROLOGUE,),
        backward=(EPILOGUE,) if is_tied else (),
        gradient=PROLOGUE,
    )
    return Parameter(name=name, shape=(rows, WIDTH), dtype=DType.FLOAT32, trainable=trainable, uses=uses)


def lookups(words_trained: bool = True) -> Workload:
    """Two blocks of one chunk each."""
    tables = [
        table("words", NUM_WORDS, is_tied=True, trainable=words_trained),
        table("places", NUM_PLACES, is_tied=False),
    ]
    found = workload([*tables, *(parameter(f"layers.{b}.weight", 1_000, b) for b in range(2))], 2)
    trained = [t.size_bytes for t in tables if t.trainable]
    row_gradient_bytes = ROW_BYTES * (PLACE_ROWS + (WORD_ROWS if words_trained else 0))
    backward = phase(sum(trained) - OUTPUT_BYTES, peak_bytes=sum(trained))
    by_rows = phase(row_gradient_bytes - OUTPUT_BYTES, peak_bytes=row_gradient_bytes)
    forward = found.prologue_forward.model_copy(update={"looked_up_bytes": ROW_BYTES * (WORD_ROWS + PLACE_ROWS)})
    tied_bytes = tables[0].size_bytes if words_trained else 0
    return found.model_copy(
        update={
            "prologue_backward": backward.model_copy(update={"gradient_bytes": sum(trained)}),
            "epilogue_backward": phase(tied_bytes - 3_000, peak_bytes=tied_bytes).model_copy(
                update={"gradient_bytes": 0}
            ),
            "row_lookups": RowLookups(
                tables=(
                    LookedUpTable(parameter=0, num_rows=WORD_ROWS),
                    LookedUpTable(parameter=1, num_rows=PLACE_ROWS),
                ),
                prologue_forward=forward,
                prologue_backward=by_rows.model_copy(update={"gradient_bytes": row_gradient_bytes}),
            ),
        }
    )


def planned(found: Workload, *, micro_batches: int = 1, max_gradient_norm: float | None = None) -> PlannedWorkload:
    plan = Plan(
        workload_id=found.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=0,
        n_buffer=2,
        looks_up_rows=True,
        micro_batches=micro_batches,
        max_gradient_norm=max_gradient_norm,
    )
    layout = build_layout(found.parameters, num_blocks=found.num_blocks, chunk_bytes=CHUNK_BYTES)
    return PlannedWorkload(found, plan, layout)
