"""A configuration with another head goes through trace, search and run as that."""

from __future__ import annotations

import json
from pathlib import Path

from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin
from tests.cli.test_run_checkpoints import MODEL
from tests.proof_size import some_quick
from tests.runtime.resuming import mixed

SHAPE = ("--batch-size=2", "--sequence-length=16")


@some_quick(
    ("named", "inputs", "has_dropout"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0, "num_labels": 3},
            {"labels": (2,)},
            False,
        ),
        # Its head drops a tenth of what it reads, where the configuration does not say.
        ({"architectures": ["LlamaForTokenClassification"]}, {"labels": (2, 16)}, True),
        ({"model_type": "bert", "architectures": ["BertForMultipleChoice"], "num_choices": 3}, {"labels": (2,)}, True),
    ],
    quick=1,
    ids=["samples", "tokens", "choices"],
)
def test_another_head_goes_through_every_command(
    named: dict[str, object],
    inputs: dict[str, tuple[int, ...]],
    has_dropout: bool,
    protwin_here: Protwin,
    work: Path,
) -> None:
    (work / "config.json").write_text(json.dumps(MODEL | named))

    def call(*arguments: str) -> str:
        result = protwin_here(*arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    call("trace", "--model=config.json", *SHAPE, "--hardware=rtx-3090", "--output=workload.json")
    workload = Workload.load(work / "workload.json")
    assert workload.batch_shapes.items() >= inputs.items()
    searched = json.loads(call("search", "--model=config.json", *SHAPE, "--hardware=rtx-3090", "--json"))
    assert searched["plan"]["workload_id"] == workload.identity
    mixed(workload).save(work / "plan.json")
    ran = protwin_here("run", "--plan=plan.json", "--workload=workload.json", "--model=config.json", "--steps=2")
    assert ran.returncode == 0, ran.stderr
    assert "over 2 steps" in ran.stdout
    # Dropout was traced as a GPU runs it.
    assert ("the peak may exceed what is guaranteed" in ran.stderr) is has_dropout
    real = json.loads(call("trace", "--real", "--model=config.json", *SHAPE, "--json"))
    assert real["batch_shapes"] == {name: list(shape) for name, shape in workload.batch_shapes.items()}
