"""Checkpoints of ``protwin run``: when they are saved, and which batches come after one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ...shared.basics.errors import FileError, ProtwinError
from ...shared.phases.quantization import Quantization
from ...shared.schema.training_options import LoraOptions, QuantizationOptions
from ..checkpoints.checkpoints import has_checkpoint
from ..data.sources import DataSource
from ..ranks.agreement import agreed
from ..training.training import Training
from .run_options import CheckpointChoice

_SCALE: Final = "lora_scale"
_UNSCALED: Final = "without --lora-alpha"
_OF_MAPS: Final = "--lora-alpha, --use-rslora and --lora-dropout"
_PACKED: Final = "quantized"
_UNPACKED: Final = "without --quantize"


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints(CheckpointChoice):
    """What the options say about checkpoints, and what no saved weight tells."""

    is_restarted: bool = False
    """Whether a launcher has started the ranks again: they go on from the checkpoint if there is one by now."""
    lora: LoraOptions | None = None
    """The low-rank maps, whose scale and dropout no saved weight tells."""
    quantized: QuantizationOptions | None = None
    """How weights are packed, which their bytes do not tell."""

    def check(self) -> None:
        """Raise ProtwinError if the options contradict each other, or what lies in the folder."""
        if self.folder is None:
            for option, is_given in (("--resume", self.is_resuming), ("--checkpoint-every", self.every is not None)):
                if is_given:
                    raise ProtwinError(f"{option} needs --checkpoint FOLDER. Name the folder.")
            return
        exists = has_checkpoint(self.folder)
        if self.is_restarted:
            return
        if self.is_resuming and not exists:
            raise FileError(f"{self.folder} holds no checkpoint. Leave out --resume to begin at the first step.")
        if exists and not self.is_resuming:
            raise FileError(
                f"{self.folder} holds something already. Pass --resume to go on from it, or name another folder."
            )

    def resume(self, training: Training, source: DataSource) -> int:
        """Go on from the checkpoint, if that is wanted; gives the batches that were trained on.

        Raises ProtwinError if the checkpoint is refused, or comes from other data.
        """
        if self.folder is None or not (self.is_resuming or self.is_restarted):
            return 0
        if self.is_restarted and not agreed(training.world, partial(has_checkpoint, self.folder)):
            return 0
        found = training.resume(self.folder).data_position
        expected = self._position(source, 0)
        self._check_maps(found, expected)
        if not isinstance(found, dict) or {**found, "batches": 0} != expected:
            raise FileError(
                f"{self.folder} was not saved by protwin run with this {source.name} and --seed {expected['seed']}. "
                f"Give both as they were."
            )
        return int(found["batches"])

    def after_step(self, training: Training, source: DataSource, *, num_batches: int, is_last: bool) -> None:
        """Save if it is time.  Raises FileError if the checkpoint cannot be written."""
        if self.folder is None:
            return
        if is_last or (self.every is not None and training.num_steps % self.every == 0):
            training.save(self.folder, data_position=self._position(source, num_batches))

    def _position(self, source: DataSource, num_batches: int) -> dict[str, int | str]:
        lora = self.lora
        is_scaled = lora is not None and (lora.alpha is not None or lora.use_rslora or lora.dropout > 0)
        maps = {_SCALE: _shown(lora)} if is_scaled else {}
        if self.quantized is not None:
            maps[_PACKED] = _shown_packed(self.quantized.how)
        return {"batches": num_batches, **maps, **source.identity}

    def _check_maps(self, found: Any, expected: Mapping[str, int | str]) -> None:
        """Raise FileError if linear maps were packed otherwise, or the low-rank ones had another scale."""
        for key, left_out, what, options in (
            (
                _SCALE,
                _UNSCALED,
                "the low-rank maps would be other ones",
                _OF_MAPS,
            ),
            (_PACKED, _UNPACKED, "the same bytes would be other weights", "--quantize and its options"),
        ):
            then = found.get(key, left_out) if isinstance(found, dict) else left_out
            now = expected.get(key, left_out)
            if then != now:
                raise FileError(
                    f"{self.folder} was saved {then}, but this run is {now}: {what}. Give {options} as they were."
                )


def _shown(lora: LoraOptions | None) -> str:
    assert lora is not None
    alpha = [] if lora.alpha is None else [f"--lora-alpha {lora.alpha:g}"]
    rslora = ["--use-rslora"] if lora.use_rslora else []
    dropout = [f"--lora-dropout {lora.dropout:g}"] if lora.dropout else []
    return f"with {' '.join([*alpha, *rslora, *dropout])}"


def _shown_packed(how: Quantization) -> str:
    double = " --double-quantize" if how.double else ""
    size = "" if how.blocksize in (None, how.type.usual_blocksize) else f" --quantization-blocksize {how.blocksize}"
    return f"with --quantize {how.type}{double}{size}"
