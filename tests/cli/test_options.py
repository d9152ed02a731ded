"""Options that commands share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protwin.shared.basics.errors import FileError, ProtwinError
from protwin.shared.cli.options import cache_folder, changes_of, examples, keep_apart, writable
from protwin.shared.cli.training_choice import LoraChoice, ScaledLora, SubspaceChoice, TrainingChoice
from protwin.shared.schema.plan import TrainingMethod
from protwin.shared.schema.training_options import FULL_TRAINING, LoraOptions, OsftOptions, TrainingOptions
from protwin.shared.schema.workload import DType


def test_changes_are_a_mapping() -> None:
    assert changes_of(None) == {}
    assert changes_of(["device.memory_bytes = 40GiB", "host=epyc=64"]) == {
        "device.memory_bytes": "40GiB",
        "host": "epyc=64",
    }


@pytest.mark.parametrize("assignment", ["", "=", "device", "device=", "=40GiB", " = "])
def test_what_is_no_assignment_is_refused(assignment: str) -> None:
    with pytest.raises(ProtwinError, match="is no assignment"):
        changes_of([assignment])


def test_writable_paths_pass(tmp_path: Path) -> None:
    assert writable(None) is None
    for path in (tmp_path / "new.json", Path("new.json"), Path("-")):
        assert writable(path) == path
    assert list(tmp_path.iterdir()) == [], "nothing is made before it is needed"


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="is a folder"):
        writable(tmp_path)
    with pytest.raises(FileError, match="is no folder"):
        writable(tmp_path / "file" / "new.json")
    with pytest.raises(FileError, match=r"folder .*/some/new is missing\. Make it first: mkdir -p /"):
        writable(tmp_path / "some" / "new" / "file.json")


def test_protected_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By asking the system, as the user who runs these tests may be allowed everything."""
    path = tmp_path / "plan.json"
    path.write_text("")
    monkeypatch.setattr(os, "access", lambda asked, mode: asked != path)
    with pytest.raises(FileError, match="is not writable for you"):
        writable(path)


def test_devices_and_pipes_can_be_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        assert writable(path) == path
    keep_apart({"--output": Path("/dev/null"), "--timeline": Path("/dev/null")}, {"--model": "/dev/null"})


def test_outputs_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("")
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    keep_apart({"--output": tmp_path / "a.json", "--timeline": None}, {"--plan": tmp_path / "plan.json"})
    keep_apart({"--output": Path("gpt2")}, {"--model": "gpt2"})
    with pytest.raises(FileError, match=r"--output .* would take the place of --plan"):
        keep_apart({"--output": tmp_path / "link.json"}, {"--plan": tmp_path / "plan.json"})
    with pytest.raises(FileError, match=r"--timeline .* would take the place of --output"):
        keep_apart({"--output": tmp_path / "a.json", "--timeline": tmp_path / "b" / ".." / "a.json"}, {})


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "protwin" / "workloads"
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_folder() == tmp_path / "home" / ".cache" / "protwin" / "workloads"


def test_examples_keep_their_lines() -> None:
    assert examples("protwin a") == "\b\nExample:\n  protwin a"
    assert examples("protwin a", "protwin b") == "\b\nExamples:\n  protwin a\n  protwin b"


def test_options_of_training() -> None:
    assert TrainingChoice().options(None) == FULL_TRAINING
    maps = LoraChoice(lora_rank=8, lora_targets=" q_proj, v_proj ")
    asked = TrainingChoice(lora=maps, frozen=["model.embed_tokens", "*.0.*"], autocast="bfloat16")
    assert asked.options(None) == TrainingOptions(
        lora=LoraOptions(rank=8, targets=("q_proj", "v_proj")),
        frozen=("model.embed_tokens", "*.0.*"),
        autocast=DType.BFLOAT16,
    )


@pytest.mark.parametrize(
    ("rank", "targets", "autocast", "message"),
    [
        (None, "q_proj", None, "--lora-targets is 'q_proj', but --lora-rank is missing"),
        (8, " , ", None, "it names nothing"),
        (None, None, "float64", "--autocast float64 is not known. Use bfloat16 or float16"),
        (None, None, "fp32", "--autocast fp32 is not known"),
    ],
)
def test_options_of_training_that_make_no_sense(
    rank: int | None, targets: str | None, autocast: str | None, message: str
) -> None:
    with pytest.raises(ProtwinError, match=message):
        TrainingChoice(lora=LoraChoice(lora_rank=rank, lora_targets=targets), autocast=autocast).options(None)


def test_scales_of_low_rank_maps() -> None:
    dora = LoraChoice(lora_rank=8, lora_dropout=0.1, use_dora=True).options()
    assert dora == LoraOptions(rank=8, dropout=0.1, use_dora=True)
    scaled = ScaledLora(lora_rank=8, lora_alpha=32.0, use_rslora=True).options()
    assert scaled == LoraOptions(rank=8, alpha=32.0, use_rslora=True)
    asked = TrainingOptions(lora=scaled)
    assert TrainingOptions(**asked.model_dump()) == asked
    # Traces that were kept before there was a scale are found by what they were kept under.
    assert LoraOptions(rank=8).model_dump(mode="json") == {"rank": 8, "targets": []}
    for given, message in (
        ({"lora_alpha": 32.0}, "--lora-alpha 32.0 is given, but --lora-rank is missing"),
        ({"use_rslora": True}, "--use-rslora is given, but --lora-rank is missing"),
        ({"use_dora": True}, "--use-dora is given, but --lora-rank is missing"),
        ({"lora_dropout": 0.1}, "--lora-dropout 0.1 is given, but --lora-rank is missing"),
        ({"lora_dtype": "float32"}, "--lora-dtype float32 is given, but --lora-rank is missing"),
    ):
        with pytest.raises(ProtwinError, match=message):
            ScaledLora(**given).options()
    with pytest.raises(ProtwinError, match=r"--lora-dtype int8 is not known. Use float32, bfloat16, float16"):
        LoraChoice(lora_rank=8, lora_dtype="int8").options()
    assert LoraChoice(lora_rank=8, lora_dtype="float32").options() == LoraOptions(rank=8, dtype=DType.FLOAT32)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ProtwinError, match=r"--lora-alpha is .* above 0 and finite"):
            ScaledLora(lora_rank=8, lora_alpha=alpha).options()


def test_options_of_orthogonal_subspaces() -> None:
    assert SubspaceChoice().options(None) is None
    assert SubspaceChoice(osft_targets=[]).options(TrainingMethod.FULL) is None
    asked = OsftOptions(unfreeze_rank_ratio=0.25, targets=("q_proj", "*.0.*"))
    chosen = SubspaceChoice(unfreeze_rank_ratio=0.25, osft_targets=["q_proj", "*.0.*"])
    assert chosen.options(TrainingMethod.OSFT) == chosen.options(None) == asked
    assert TrainingChoice(subspaces=chosen).options(None) == TrainingOptions(osft=asked)
    # Traces that were kept before there was the option are found by what they were kept under.
    assert "osft" not in FULL_TRAINING.model_dump(mode="json")
    assert TrainingOptions(**TrainingOptions(osft=asked).model_dump()).osft == asked


@pytest.mark.parametrize(
    ("method", "ratio", "targets", "message"),
    [
        (TrainingMethod.OSFT, None, None, "Add --unfreeze-rank-ratio 0.25"),
        (None, None, ["q_proj"], "--osft-target is 'q_proj', but --unfreeze-rank-ratio is missing"),
        (TrainingMethod.FULL, 0.25, None, "--method full factorises nothing"),
        (TrainingMethod.BYPASS, 0.25, None, "--method bypass factorises nothing"),
        (None, -0.1, None, "from 0 to 1"),
        (None, 1.5, None, "from 0 to 1"),
        (None, float("nan"), None, "from 0 to 1"),
    ],
)
def test_options_of_orthogonal_subspaces_that_make_no_sense(
    method: TrainingMethod | None, ratio: float | None, targets: list[str] | None, message: str
) -> None:
    with pytest.raises(ProtwinError, match=message):
        SubspaceChoice(unfreeze_rank_ratio=ratio, osft_targets=targets).options(method)
