"""What ``protwin run`` trains on and evaluates on: a text, or JSON Lines with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shared.basics.errors import FileError, ProtwinError, WorkloadError
from ...shared.schema.training_options import ImageOptions
from ...shared.schema.workload import Workload
from ...shared.tables.labels import format_share
from ..data.byte_text import read_text
from ..data.documents import Document, RowTokenizer, check_lengths, check_vocabulary, load_tokenizer
from ..data.json_lines import Form, read_rows
from ..data.sources import DataSource, PackedSource, TextSource
from ..model.heads import reads_forward
from .random_batches import NoiseSource, reads_text_alone
from .run_options import DataChoice, LossWeighting

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunData:
    """The data, read and ready."""

    source: DataSource
    evaluation: PackedSource | None
    tokenizer: Any | None


@dataclass(frozen=True, kw_only=True)
class RunSource(DataChoice):
    """What the options say of data, beside the weights, whose tokenizer is taken where none is named."""

    weights: Path | None
    seed: int
    loss_weighting: LossWeighting = LossWeighting.TOKENS
    images: ImageOptions | None = None
    """Of what is made up beside text."""

    def check(self) -> None:
        """Raise ProtwinError if the options contradict each other."""
        if self.data and self.text is not None:
            raise ProtwinError("--data and --text are two things to train on. Give one of them.")
        if self.weights is not None and not self.data:
            raise ProtwinError(
                "--weights needs --data FILE.jsonl to train on: bytes as tokens mean nothing to trained weights."
            )
        if self.data and self.weights is None and self.tokenizer is None:
            raise ProtwinError("--data without --weights needs --tokenizer FOLDER. Name the folder of a tokenizer.")
        needs_data = {"--evaluation": self.evaluation is not None, "--tokenizer": self.tokenizer is not None}
        for option, is_given in needs_data.items():
            if is_given and not self.data:
                raise ProtwinError(f"{option} needs --data FILE.jsonl. Name what to train on.")
        if self.evaluate_every is not None and self.evaluation is None:
            raise ProtwinError("--evaluate-every needs --evaluation FILE.jsonl. Name what to evaluate on.")

    def read(self, twin: Any, workload: Workload, tell: Tell) -> RunData:
        """Read everything, and ``tell`` what of it is trained on.  Raises ProtwinError if it does not fit the model."""
        if not self.data:
            text = read_text(self.text)
            if not reads_text_alone(twin):
                return RunData(NoiseSource(twin, workload, text, self.seed, self.images), None, None)
            return RunData(TextSource(twin, text, *_batch_shape(workload), self.seed), None, None)
        _check_reads_data(twin, workload)
        batch_size, length = _batch_shape(workload)
        folder = self.tokenizer or self.weights
        assert folder is not None
        tokenizer = load_tokenizer(folder)
        check_vocabulary(tokenizer, int(twin.get_input_embeddings().weight.shape[0]), folder)
        rows = RowTokenizer(tokenizer, folder)

        def packed(paths: Sequence[Path], purpose: str) -> PackedSource:
            documents = _documents(paths, rows, purpose, tell)
            check_lengths(documents, length)
            weighs_tokens = self.loss_weighting is LossWeighting.TOKENS
            source = PackedSource(documents, batch_size, length, int(tokenizer.eos_token_id), self.seed, weighs_tokens)
            num_sequences = source.num_sequences(1)
            num_tokens = sum(len(document.tokens) for document in documents)
            tell(
                f"{purpose}: {len(documents):,} documents, {num_tokens:,} tokens, in {num_sequences:,} sequences of "
                f"{length:,} ({format_share(num_tokens / (num_sequences * length))} full)"
            )
            return source

        train = packed(self.data, "training")
        evaluation = packed([self.evaluation], "evaluation") if self.evaluation is not None else None
        return RunData(train, evaluation, tokenizer)


def _batch_shape(workload: Workload) -> tuple[int, int]:
    """Samples, and tokens of one: of several choices per sample each has this length."""
    samples = workload.num_samples
    return samples, workload.batch_shapes.get("input_ids", (samples, workload.num_tokens // samples))[-1]


def _check_reads_data(twin: Any, workload: Workload) -> None:
    if not reads_forward(twin):
        raise WorkloadError(
            f"{type(twin).__name__} is no causal language model, which --data trains alone. Train it with batches of "
            f"its own (protwin.runtime.carry_out)."
        )
    if set(workload.batch_shapes) != {"input_ids", "labels"}:
        raise WorkloadError(
            f"the workload's batch is made of {', '.join(workload.batch_shapes)}, but --data gives input_ids and "
            f"labels alone. Trace the model from its configuration (protwin trace --model)."
        )


def _documents(paths: Sequence[Path], tokenizer: RowTokenizer, purpose: str, tell: Tell) -> list[Document]:
    rows = [row for path in paths for row in read_rows(path)]
    if any(row.form is Form.CHAT for row in rows):
        tell(
            f"{purpose}: of conversations the assistant's turns count"
            if tokenizer.marks_assistant
            else f"{purpose}: of conversations every turn counts, since the chat template does not mark the assistant's"
        )
    found = tokenizer.documents(rows)
    documents = [document for document in found if document.is_learned.any()]
    named = ", ".join(map(str, paths))
    if not documents:
        raise FileError(f"no row of {named} has a token to learn. Give rows that are not empty.")
    if len(documents) < len(found):
        tell(f"{purpose}: {len(found) - len(documents):,} rows have no token that counts, and are left out")
    return documents
