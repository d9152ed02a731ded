"""From what a user calls a model to its workload."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protwin.shared.basics.errors import CatalogueError, FileError, ProtwinError, WorkloadError
from protwin.shared.catalogue.machines import machine
from protwin.shared.catalogue.own_code import own_code
from protwin.shared.phases.operations import KernelPackage
from protwin.shared.phases.tiling import LossHead
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.training_options import FULL_TRAINING, LoraOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.students.student import Student
from protwin.shared.workloads import source as workload_source
from protwin.shared.workloads.source import WorkloadRequest, resolve_workload
from protwin.shared.workloads.untraced import resolve_family
from tests.shared.laid_out import decoder_workload

CPU = machine("rtx-3090").device.model_copy(update={"kind": DeviceKind.CPU})
CONFIGURATION = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 128, "n_positions": 64}
Ask = Callable[..., Workload]


class Tracer:
    """Stands for the tracer, which needs torch; notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(
        self, configuration: dict[str, Any], *, on_progress: Callable[[int, int], None], **shape: Any
    ) -> Workload:
        on_progress(1, 1)
        self.asked.append({"configuration": configuration} | shape)
        return decoder_workload(configuration.get("n_layer", 2), model_name=shape["name"])


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    planted = Tracer()
    monkeypatch.setattr(workload_source, "plugin", lambda group, name: planted)
    return planted


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def ask(tmp_path: Path, tracer: Tracer, warnings: list[str]) -> Ask:
    """``resolve_workload`` with a cache, for a batch of 1 x 8."""

    def resolve(model: str | Path, **changes: Any) -> Workload:
        cache = changes.pop("cache", tmp_path / "cache")
        asked = WorkloadRequest(str(model), **({"batch_size": 1, "sequence_length": 8} | changes))
        return resolve_workload(asked, cache=cache, warn=warnings.append)

    return resolve


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIGURATION))
    return path


def test_a_configuration_is_traced_once_for_each_shape(ask: Ask, configuration: Path, tracer: Tracer) -> None:
    first = ask(configuration)
    assert tracer.asked == [
        {
            "configuration": CONFIGURATION,
            "name": "small",
            "batch_size": 1,
            "sequence_length": 8,
            "dtype": None,
            "options": FULL_TRAINING,
            "device_kind": DeviceKind.CUDA,
            "mlp_tiles": (),
            "loss_tiles": (),
            "sequence_ranks": (),
            "packing": None,
        }
    ]
    assert ask(configuration) == first
    assert len(tracer.asked) == 1
    for change in (
        {"batch_size": 2},
        {"sequence_length": 16},
        {"dtype": "bfloat16"},
        {"mlp_tiles": (2, 4)},
        {"loss_tiles": (4,)},
    ):
        ask(configuration, **change)
        assert tracer.asked[-1] == tracer.asked[0] | change
    assert len(tracer.asked) == 6
    ask(configuration, mlp_tiles=[4, 1, 2, 4], loss_tiles=[])
    assert len(tracer.asked) == 6, "the order of tiles, and one tile, ask for nothing else"


def test_saved_workloads_have_the_tiles_that_they_were_traced_with(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    saved = decoder_workload(2)
    saved.save(path)
    shape = {"batch_size": None, "sequence_length": None}
    assert ask(path, **shape, mlp_tiles=(1,)) == saved
    with pytest.raises(WorkloadError, match=r"mlp_tiles 4 .* knows 1\. Trace .*--mlp-tiles 4"):
        ask(path, **shape, mlp_tiles=(1, 4))
    with pytest.raises(WorkloadError, match=r"loss_tiles 2, 8 .* knows 1\. Trace .*--loss-tiles 2"):
        ask(path, **shape, loss_tiles=(8, 2))


def test_another_configuration_of_the_same_name_is_traced(ask: Ask, configuration: Path, tracer: Tracer) -> None:
    ask(configuration)
    configuration.write_text(json.dumps(CONFIGURATION | {"n_layer": 3}))
    assert ask(configuration).num_blocks == 3
    assert len(tracer.asked) == 2


def test_without_a_cache_nothing_is_kept(ask: Ask, configuration: Path, tracer: Tracer, tmp_path: Path) -> None:
    ask(configuration, cache=None)
    ask(configuration, cache=None)
    assert len(tracer.asked) == 2
    assert not (tmp_path / "cache").exists()


def test_a_damaged_entry_is_traced_anew(ask: Ask, configuration: Path, tracer: Tracer, tmp_path: Path) -> None:
    first = ask(configuration)
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_text(entry.read_text().replace("1024", "1025"))
    assert ask(configuration) == first
    assert len(tracer.asked) == 2
    assert ask(configuration) == first
    assert len(tracer.asked) == 2, "the entry was mended"


def test_a_cache_that_cannot_be_written_is_a_warning(
    ask: Ask, configuration: Path, warnings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert ask(configuration, cache=tmp_path / "file").model_name == "small"
    (warning,) = warnings
    assert warning.startswith("the traced workload is not kept: ")


@pytest.mark.parametrize("model", ["gpt2", "opt-1.3b"])
def test_dropout_is_traced_for_a_cpu(model: str, ask: Ask, tracer: Tracer, warnings: list[str]) -> None:
    """In attention and by itself."""
    on_gpu = ask(model)
    assert not warnings
    assert ask("llama-3.2-1b", device=CPU).num_blocks == 16
    assert tracer.asked == []
    assert not warnings
    ask(model, device=CPU)
    assert tracer.asked[0]["device_kind"] is DeviceKind.CPU
    assert not warnings
    assert ask(model) == on_gpu, "what was traced for a CPU is not taken for a GPU's"


def test_a_name_of_the_catalogue_is_answered_without_a_trace(ask: Ask, tracer: Tracer, warnings: list[str]) -> None:
    found = ask("gpt2", batch_size=3, sequence_length=77)
    assert (found.model_name, found.batch_shapes["input_ids"], found.num_blocks) == ("gpt2", (3, 77), 12)
    assert found.num_parameters == 124_439_808
    assert found.compute_dtype is DType.FLOAT32
    assert ask("gpt2", dtype="float16").compute_dtype is DType.FLOAT16
    assert tracer.asked == []
    assert warnings == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch_size": 1, "sequence_length": 1025}, "sequence_length is 1025.*1024.*learned positions"),
        ({"batch_size": 2**62, "sequence_length": 8}, "batch_size is 4611686018427387904"),
        ({"dtype": "float64"}, "dtype 'float64' cannot be trained"),
        ({"dtype": "floaty"}, "dtype 'floaty' cannot be trained"),
    ],
)
def test_impossible_questions_about_a_shipped_model(ask: Ask, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        ask("gpt2", **asked)


def test_images_have_no_sequence(ask: Ask, tracer: Tracer) -> None:
    assert ask("vit-huge", batch_size=4, sequence_length=None).batch_shapes["pixel_values"] == (4, 3, 224, 224)
    with pytest.raises(WorkloadError, match="sequence_length is 8, but vit-huge has none"):
        ask("vit-huge")
    with pytest.raises(WorkloadError, match=r"fixes no batch. Say its shape, for example --batch-size 1 \(in Python b"):
        ask("vit-huge", batch_size=None, sequence_length=None)


@pytest.mark.parametrize(
    "asked",
    [
        {"sequence_length": 1},
        {"options": TrainingOptions(frozen=("transformer.wte",))},
        {"options": TrainingOptions(lora=LoraOptions(rank=4, targets=("c_fc",)))},
    ],
)
def test_what_is_not_shipped_is_traced_without_a_warning(
    ask: Ask, tracer: Tracer, warnings: list[str], asked: dict[str, Any]
) -> None:
    ask("gpt2", **asked)
    assert tracer.asked[0]["name"] == "gpt2"
    assert tracer.asked[0]["configuration"]["n_layer"] == 12
    assert tracer.asked[0]["options"] == asked.get("options", FULL_TRAINING)
    assert warnings == []


def test_other_options_are_other_entries_of_the_cache(ask: Ask, configuration: Path, tracer: Tracer) -> None:
    several = [
        FULL_TRAINING,
        TrainingOptions(frozen=("a",)),
        TrainingOptions(autocast=DType.BFLOAT16),
        TrainingOptions(lora=LoraOptions(rank=4)),
        TrainingOptions(lora=LoraOptions(rank=8)),
        TrainingOptions(lora=LoraOptions(rank=8, targets=("c_attn",))),
    ]
    for _ in range(2):
        for options in several:
            ask(configuration, options=options)
    assert [asked["options"] for asked in tracer.asked] == several


def test_students_are_traced_under_autocast_and_with_the_code_that_may_run(
    ask: Ask, configuration: Path, tracer: Tracer
) -> None:
    student, narrow = Student(), TrainingOptions(autocast=DType.BFLOAT16)
    codes = []
    for text in ("one = 1", "two = 2"):
        (configuration.parent / "mine.py").write_text(text)
        codes.append(own_code(configuration.parent, {"auto_map": {"AutoConfig": "mine.Config"}}))
    asked: list[dict[str, Any]] = [
        {"options": FULL_TRAINING, "code": None},
        {"options": narrow, "code": None},
        *({"options": narrow, "code": code} for code in codes),
    ]
    for one in asked * 2:
        ask(configuration, student=student, **one)
    assert [{name: found[name] for name in ("options", "code")} for found in tracer.asked] == asked
    # What comes with the package knows nothing of autocast.
    for options, num_traced in ((FULL_TRAINING, 0), (narrow, 1)):
        tracer.asked.clear()
        ask("llama-3-8b", student=student, options=options)
        assert len(tracer.asked) == num_traced
    for option, others in (
        ("--freeze", {"frozen": ("a",), "autocast": DType.BFLOAT16}),
        ("--kernels and --keeps-outputs", {"kernels": (KernelPackage.MAMBA_SSM,), "keeps_outputs": True}),
        ("--loss", {"loss_head": LossHead.FUSED}),
    ):
        with pytest.raises(WorkloadError, match=f"what of it is learnt.*Leave out {option}, or --student"):
            ask(configuration, student=student, options=TrainingOptions.model_validate(others))
    with pytest.raises(WorkloadError, match=r"tiles are asked for \(loss_tiles 2, 8\), but blocks that learn"):
        ask(configuration, student=student, options=FULL_TRAINING, loss_tiles=(1, 2, 8))


def test_a_name_of_the_catalogue_goes_before_a_file(
    ask: Ask, tracer: Tracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").write_text("a file that happens to be called so")
    assert ask("gpt2").model_name == "gpt2"


def test_another_usual_name_means_the_same_model(ask: Ask, tracer: Tracer, warnings: list[str]) -> None:
    found = ask("llama-3-405b")
    assert found == ask("llama-3.1-405b")
    assert found.num_parameters == 405_853_388_800
    assert resolve_family("llama-3-405b", dtype="float16") == resolve_family("llama-3.1-405b", dtype="float16")
    assert resolve_family("no-such-model") is None
    assert (tracer.asked, warnings) == ([], [])


def test_a_saved_workload_is_trained_as_it_was_traced(ask: Ask, tmp_path: Path) -> None:
    decoder_workload(3).save(tmp_path / "workload.json")
    asked = {"batch_size": None, "sequence_length": None, "options": TrainingOptions(frozen=("a",))}
    with pytest.raises(WorkloadError, match="--freeze"):
        ask(tmp_path / "workload.json", **asked)


def test_a_saved_workload_is_read(ask: Ask, tracer: Tracer, tmp_path: Path) -> None:
    saved = decoder_workload(3)
    saved.save(tmp_path / "workload.json")
    shape = {"batch_size": None, "sequence_length": None}
    assert ask(tmp_path / "workload.json", **shape) == saved
    same = {"batch_size": saved.num_samples, "sequence_length": saved.num_tokens // saved.num_samples}
    assert ask(tmp_path / "workload.json", **same, dtype=str(saved.compute_dtype)) == saved
    assert tracer.asked == []


@pytest.mark.parametrize("change", [{"batch_size": 5}, {"sequence_length": 7}, {"dtype": "float16"}])
def test_a_saved_workload_has_one_shape(ask: Ask, tmp_path: Path, change: dict[str, Any]) -> None:
    decoder_workload(3).save(tmp_path / "workload.json")
    with pytest.raises(WorkloadError, match=f"--{next(iter(change)).replace('_', '-')}"):
        ask(tmp_path / "workload.json", **({"batch_size": None, "sequence_length": None} | change))


@pytest.mark.parametrize("missing", ["batch_size", "sequence_length"])
def test_a_configuration_needs_a_shape(ask: Ask, missing: str) -> None:
    with pytest.raises(WorkloadError, match=r"fixes no batch. .* --sequence-length \d+ ") as refused:
        ask("gpt2", **{missing: None})
    said = re.search(r"--batch-size (\d+) --sequence-length (\d+)", str(refused.value))
    assert said is not None
    ask("gpt2", batch_size=int(said[1]), sequence_length=int(said[2]))  # what is proposed can be asked


def test_what_is_no_model_is_refused(ask: Ask, tmp_path: Path) -> None:
    Plan(workload_id="w", chunk_bytes=1, n_persist=0, n_buffer=1).save(tmp_path / "plan.json")
    with pytest.raises(FileError, match="is a plan file"):
        ask(tmp_path / "plan.json")
    with pytest.raises(FileError, match="does not exist"):
        ask(tmp_path / "missing.json")
    with pytest.raises(CatalogueError, match="gpt2"):
        ask("gpt-22")


def test_what_the_tracer_refuses_is_not_kept(
    ask: Ask, configuration: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any, **shape: Any) -> Workload:
        raise WorkloadError("no such family.")

    monkeypatch.setattr(workload_source, "plugin", lambda group, name: refuse)
    with pytest.raises(ProtwinError, match="no such family"):
        ask(configuration)
    assert not (tmp_path / "cache").exists()
