"""Options of ``protwin search`` that narrow the space of plans: the values that a knob may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import gcd
from typing import Annotated, Any

import typer

from ...shared.basics.errors import PlanError
from ...shared.cli.options import HostGradientsName, OptimizerName, size_option
from ...shared.phases.sequence_sharing import why_not_shared
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import HostGradients, Optimizer
from ...shared.schema.plan import MOST_RANKS, ParallelMode, why_not_shard_ranks
from ..searching.request import Step
from ..space.space import ALL, LARGEST_KNOB, SearchSpace
from ..space.step_spec import SEVERAL
from .machine_choice import NumRanks, ranks_to_search
from .options import MaxGradientNorm, MicroBatches


def _allowed(name: str, help_text: str, *, least: int = 0) -> Any:
    """An option for a knob that counts something from ``least`` up."""
    return typer.Option(name, metavar="N", min=least, max=LARGEST_KNOB, help=help_text)


def count_or_all(text: str) -> int | str:
    """A value of a knob, or ``ALL`` for everything sensible.  Raises BadParameter for anything else."""
    if text == ALL:
        return text
    if not text.isdecimal() or int(text) > LARGEST_KNOB:
        raise typer.BadParameter(f"{text!r} is neither a number from 0 to {LARGEST_KNOB} nor {ALL}.")
    return int(text)


def _allowed_or_all(name: str, help_text: str) -> Any:
    return typer.Option(name, metavar="N|all", parser=count_or_all, help=help_text)


AllowedSequenceRanks = Annotated[
    list[int] | None,
    typer.Option(
        "--sequence-ranks",
        metavar="N",
        min=1,
        max=MOST_RANKS,
        help="Allow this number of neighbouring ranks that share each sequence (repeatable); 1 and all that the "
        "workload knows unless given.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ProductKnobs:
    """What of products is kept, and in how many tiles they run; see [Note: Groups of options] there."""

    product_stride: Annotated[
        list[int] | None,
        _allowed_or_all(
            "--product-stride",
            "Allow checkpointed blocks that keep the first of every so many of their products, and attention "
            "(repeatable), 0 for none, or all of it; none unless given.",
        ),
    ] = None
    mlp_tiles: Annotated[
        list[int] | None,
        _allowed(
            "--mlp-tiles",
            "Allow MLPs that run in this number of tiles of tokens (repeatable), 1 for whole; of long sequences those "
            "that may matter unless given.",
            least=1,
        ),
    ] = None
    loss_tiles: Annotated[
        list[int] | None,
        _allowed("--loss-tiles", "The same of head and loss (repeatable).", least=1),
    ] = None

    @property
    def strides(self) -> tuple[int, ...] | None:
        """What checkpointed blocks may keep, as ``SearchSpace.product_stride`` has it."""
        named = self.product_stride or ()
        if ALL in named:
            return None
        return tuple(number for number in named if isinstance(number, int)) or (0,)


@dataclass(frozen=True, kw_only=True)
class AllowedKnobs:
    """The values that each knob may take; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option("--chunk-bytes", parser=size_option, metavar="SIZE", help="Allow this chunk size (repeatable)."),
    ] = None
    n_persist: Annotated[
        list[int] | None, _allowed("--n-persist", "Allow this number of persistent chunks (repeatable).")
    ] = None
    n_host_stepped: Annotated[
        list[int] | None,
        _allowed_or_all(
            "--n-host-stepped",
            "Allow this number of chunks that the device keeps and the host steps (repeatable), or all that are "
            "sensible; 0 unless given.",
        ),
    ] = None
    n_shard: Annotated[
        list[int] | None,
        _allowed(
            "--n-shard", "Allow this number of chunks that are sharded over the devices, in mode sharded (repeatable)."
        ),
    ] = None
    looks_up_rows: Annotated[
        bool,
        typer.Option(
            "--looks-up-rows", help="Search plans that look rows of embeddings up on the host, and no others."
        ),
    ] = False
    n_disk_state: Annotated[
        list[int] | None,
        _allowed(
            "--n-disk-state",
            "Allow this number of offloaded chunks whose optimizer state lies on the host's disk (repeatable).",
        ),
    ] = None
    n_disk: Annotated[
        list[int] | None,
        _allowed("--n-disk", "Allow this number of them whose parameters lie there too (repeatable); 0 unless given."),
    ] = None
    n_staging: Annotated[
        list[int] | None,
        _allowed(
            "--n-staging",
            "Allow this number of places that chunks on the disk share (repeatable); 2 and 3 unless given.",
            least=1,
        ),
    ] = None
    n_buffer: Annotated[list[int] | None, _allowed("--n-buffer", "Allow this number of buffers (repeatable).")] = None
    prefetch_depth: Annotated[
        list[int] | None, _allowed("--prefetch-depth", "Allow this prefetch depth (repeatable).", least=1)
    ] = None
    n_checkpoint: Annotated[
        list[int] | None, _allowed("--n-checkpoint", "Allow this number of checkpointed blocks (repeatable).")
    ] = None
    n_swap: Annotated[
        list[int] | None,
        _allowed_or_all(
            "--n-swap", "Allow this number of swapped blocks (repeatable), or all that are sensible; 0 unless given."
        ),
    ] = None
    n_offload_input: Annotated[
        list[int] | None,
        _allowed_or_all(
            "--n-offload-input",
            "Allow this number of checkpointed blocks whose input waits on the host (repeatable), or all that are "
            "sensible; some only where nothing fits unless given.",
        ),
    ] = None
    products: ProductKnobs

    def space(self, *, loss_tiles: Sequence[int] | None, sequence_ranks: Sequence[int] | None) -> SearchSpace:
        """The plans that these values leave, with those of ``loss_tiles`` and ``sequence_ranks``."""
        own = {knob.name: getattr(self, knob.name) for knob in fields(self)}
        del own["looks_up_rows"], own["products"]
        named = own | asdict(self.products) | {"loss_tiles": loss_tiles, "sequence_ranks": sequence_ranks}
        allowed = {knob: tuple(values) for knob, values in named.items() if values}
        return SearchSpace.model_validate(allowed | {"looks_up_rows": self.looks_up_rows})


def groups_that_share(sequence_ranks: Sequence[int] | None, num_ranks: int) -> int:
    """Groups of ranks with batches of their own, where those share sequences that are named for it: the most of them.

    Raises PlanError if they make no equal groups.
    """
    for number in sequence_ranks or ():
        if (reason := why_not_shared(number, num_ranks)) is not None:
            raise PlanError(f"{reason}.")
    return num_ranks // gcd(*(sequence_ranks or (1,)))


@dataclass(frozen=True, kw_only=True)
class StepChoice:
    """What is the same for every plan; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    micro_batches: MicroBatches = None
    max_gradient_norm: MaxGradientNorm = None
    optimizer: OptimizerName = None
    host_gradients: HostGradientsName = None
    num_ranks: NumRanks = None
    parallel: Annotated[
        list[ParallelMode] | None,
        typer.Option("--parallel", help="Allow this way of training together (repeatable); all unless given."),
    ] = None
    shard_ranks: Annotated[
        list[int] | None,
        _allowed_or_all(
            "--shard-ranks",
            "Allow shard groups of this number of neighbouring ranks, with replicas across them, in mode sharded "
            "(repeatable), or all that make equal groups; all ranks and those of one node unless given.",
        ),
    ] = None

    def ranks_of(self, machine: Hardware) -> int:
        """How many ranks take it.  Raises what ``ranks_to_search`` raises."""
        return ranks_to_search(machine, self.num_ranks, self.parallel or ())

    def step(self, num_ranks: int) -> Step:
        """The step of so many ranks.

        Raises PlanError if they make no equal groups, or if no mode that is named has any.
        """
        return Step(
            micro_batches=self.micro_batches or 1,
            max_gradient_norm=self.max_gradient_norm,
            optimizer=self.optimizer or Optimizer.ADAMW,
            host_gradients=self.host_gradients or HostGradients.PARAMETERS,
            num_ranks=num_ranks,
            modes=tuple(self.parallel or ()) or SEVERAL,
            shard_ranks=self._shard_groups(num_ranks),
        )

    def _shard_groups(self, num_ranks: int) -> tuple[int, ...] | None:
        """As ``Step.shard_ranks`` has them."""
        named: Sequence[int | str] = self.shard_ranks or ()
        if not named:
            return None
        parallel = self.parallel or [ParallelMode.SHARDED]
        mode = ParallelMode.SHARDED if ParallelMode.SHARDED in parallel else parallel[0]
        numbers = tuple(number for number in named if isinstance(number, int))
        for number in numbers or (num_ranks,):
            if (reason := why_not_shard_ranks(number, num_ranks, mode)) is not None:
                raise PlanError(f"{reason}.")
        return () if ALL in named else numbers
