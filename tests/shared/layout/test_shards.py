"""What a rank steps of its part of a chunk: a stretch of every parameter that reaches into it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.shards import rank_part, regions, stepped_parts
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.workload import DType, Parameter
from tests.proof_size import examples

MEMBERS = st.lists(
    st.tuples(st.integers(0, 700), st.sampled_from((DType.FLOAT32, DType.BFLOAT16)), st.booleans()),
    min_size=1,
    max_size=12,
)


def most_pieces(members: list[Parameter], num_shards: int) -> int:
    """Every scalar of a region asked whose shard it lies in: the most parameters that one shard has any of."""
    owners = [set[int]() for _ in range(num_shards)]
    size = sum(-(-member.size_bytes // 256) * 256 for member in members)
    shard_bytes = -(-size // 64 // num_shards) * 64
    begin = 0
    for number, member in enumerate(members):
        for at in range(begin, begin + member.size_bytes, member.dtype.item_bytes):
            owners[at // shard_bytes].add(number)
        begin += -(-member.size_bytes // 256) * 256
    return max(1, *map(len, owners))


@settings(max_examples=examples(300, 40), deadline=None)
@given(MEMBERS, st.integers(2, 9))
def test_steps_are_counted_once_for_each_stretch(drawn: list[tuple[int, DType, bool]], num_shards: int) -> None:
    """The wrong variant counts the steps of a region once, as if its parameters were one."""
    parameters = tuple(
        Parameter(name=str(number), shape=(size,), dtype=dtype, trainable=trainable, block=0)
        for number, (size, dtype, trainable) in enumerate(drawn)
    )
    (chunk,) = build_layout(parameters, num_blocks=1, chunk_bytes=2**20).chunks
    of_optimizers = {
        optimizer: rank_part(chunk, parameters, ParallelMode.SHARDED, num_shards, optimizer).state_bytes
        for optimizer in (Optimizer.ADAMW, Optimizer.SGD)
    }
    runs: list[list[Parameter]] = []
    for member in parameters:
        alike = runs and (runs[-1][0].dtype, runs[-1][0].trainable) == (member.dtype, member.trainable)
        runs = [*runs[:-1], [*runs[-1], member]] if alike else [*runs, [member]]
    trained = [run for run in runs if run[0].trainable]
    counts = sum(most_pieces(run, num_shards) for run in trained)
    scalars = sum(r.shard_elements(num_shards) for r in regions(chunk, parameters) if r.trainable)
    # A second moment of four bytes a scalar, and a count of four bytes a stretch.
    assert of_optimizers[Optimizer.ADAMW] - of_optimizers[Optimizer.SGD] == 4 * scalars + 4 * counts
    assert len(stepped_parts(chunk, parameters, num_shards)) == counts
