"""Programs with adapters equal traces, figure by figure; sizes that are primes tell which of them make a figure."""

from __future__ import annotations

import random
from importlib.resources import files
from typing import Any

import pytest

from protwin.runtime.polynomials.adapters import first_different, sized_family, traced_with_adapters, why_not
from protwin.runtime.polynomials.family_fit import NotPolynomialError
from protwin.runtime.polynomials.sized_fit import fit_sized_piece
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.families.shipped import shipped_family, shipped_sized, sized_families
from protwin.shared.families.sized import fixed, polynomials_of
from protwin.shared.observed.assembly import TracedShape
from protwin.shared.observed.observation import Observation, OperatorCall
from protwin.shared.phases.quadratic import SHORTEST_SQUARE
from protwin.shared.phases.quantization import Quantization, QuantizedType
from protwin.shared.schema.plan import ActivationMode
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.training_options import LoraOptions, QuantizationOptions, TrainingOptions
from protwin.shared.schema.workload import BlockId, DType, OperationClass
from protwin.shared.workloads.source import WorkloadRequest, untraced_workload

BESIDE = ("software", "published_dtype", "dtype_origin", "rotary_tokens")
"""Of a workload, what its configuration says, or who traced it."""
PRIMES = [(5, 101, 13, 331), (7, 211, 17, 457), (11, 97, 19, 709), (13, 307, 23, 521), (3, 59, 29, 401)]
HOW = [
    None,
    Quantization(type=QuantizedType.NF4, blocksize=64),
    Quantization(type=QuantizedType.NF4, blocksize=128, double=True),
    Quantization(type=QuantizedType.FP4, blocksize=64, double=True),
    Quantization(type=QuantizedType.INT8),
    Quantization(type=QuantizedType.GPTQ, blocksize=64),
    Quantization(type=QuantizedType.GPTQ_8BIT, blocksize=32),
]
ALL = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
SHIPPED = sorted(entry.name for entry in (files("protwin.shared") / "catalogue" / "data" / "adapters").iterdir())


def made_up(values: tuple[int, ...], *, odd_bytes: int = 0) -> TracedShape:
    """What a trace of a made-up model of one product sees, which leaves a sum of four sizes behind."""
    b, s, r, h = values
    product, added = ((0, 2 * b * s * h), (1, 2 * r * h)), ((0, 2 * b * s * r), (1, 4 * h))
    calls = [
        OperatorCall("mm", OperationClass.MATMUL, DType.BFLOAT16, 2 * b * s * h * r, product, (2 * b * s * r,)),
        OperatorCall("add", OperationClass.ELEMENTWISE, DType.BFLOAT16, b * s, added, (4 * b * s,)),
    ]
    levels = [2 * b * s * r, 2 * b * s * r + 4 * b * s - 3 * h + 7]
    seen = Observation(0, levels[-1] + 5 * r * h + odd_bytes, calls=calls, levels=levels, adding_levels=list(levels))
    seen.operations += [call.operation() for call in calls]
    observed = {ActivationMode.KEEP: {(TaskKind.FORWARD, BlockId(0)): seen}}
    return TracedShape({"input_ids": (b, s)}, b, b * s, 8 * b * s, observed)


def test_figures_of_other_sizes_follow_from_primes() -> None:
    piece = fit_sized_piece({v: made_up(v) for v in PRIMES}, least=(1, 1, 1, 1), most=(None,) * 4)
    draw = random.Random(20)
    for _ in range(20):
        values = tuple(draw.randrange(1, SHORTEST_SQUARE) for _ in range(4))
        assert piece.shape_at(values).observed == made_up(values).observed
        known = [fixed(p, values[2:], 2) for p in polynomials_of(piece)]
        assert all(len(exponents) == 2 for polynomial in known for exponents in polynomial)


def test_a_figure_that_is_no_sum_of_products_is_refused() -> None:
    traced = {v: made_up(v) for v in PRIMES}
    traced[PRIMES[2]] = made_up(PRIMES[2], odd_bytes=2)
    with pytest.raises(NotPolynomialError, match="net bytes, forward of 0 in mode keep is"):
        fit_sized_piece(traced, least=(1, 1, 1, 1), most=(None,) * 4)


def compared(model: str, draw: random.Random, how: Quantization | None, dtype: str, targets: tuple[str, ...]) -> None:
    """A drawn shape and rank of a shipped program equals its trace."""
    quantized = None if how is None else QuantizationOptions(how=how)
    options = TrainingOptions(lora=LoraOptions(rank=draw.randrange(1, 33), targets=targets), quantized=quantized)
    shape: dict[str, Any] = {"batch_size": draw.choice((1, 2, 5)), "sequence_length": draw.randrange(2, 400)}
    asked: dict[str, Any] = {"dtype": dtype, "options": options}
    found = untraced_workload(WorkloadRequest(model, **shape, **asked))
    assert found is not None
    traced = workload_of_configuration(model_configuration(model).config, name=model, **shape, **asked)
    assert first_different(found, traced, but=BESIDE) is None, (
        model,
        options,
        shape,
    )


def test_a_drawn_model_with_packed_weights_equals_its_trace() -> None:
    draw = random.Random(2027)
    compared(draw.choice(("llama-3.2-1b", "qwen3-0.6b", "smollm2-135m")), draw, HOW[3], "float16", ())


def test_a_drawn_model_with_groups_equals_its_trace() -> None:
    """With biases, which an operation of their own adds behind products."""
    compared("qwen2.5-0.5b", random.Random(41), HOW[5], "bfloat16", ())


def test_what_frames_of_a_recomputation_hold_is_the_programs_too() -> None:
    """Unpacked weights are what they hold most of; programs that had no such figure were some percent too small."""
    compared("qwen2.5-14b", random.Random(1), HOW[5], "bfloat16", ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"blocksize": 32}, id="groups of another size"),
        pytest.param({"type": QuantizedType.GPTQ_8BIT}, id="other bits"),
    ],
)
def test_a_derivation_with_other_groups_is_told_from_the_trace(wrong: dict[str, Any]) -> None:
    shape, asked = {"batch_size": 1, "sequence_length": 19}, {"dtype": "bfloat16"}
    how = Quantization(type=QuantizedType.GPTQ, blocksize=64)
    options = [
        TrainingOptions(lora=LoraOptions(rank=3), quantized=QuantizationOptions(how=each))
        for each in (how, how.model_copy(update=wrong))
    ]
    config = model_configuration("smollm2-135m").config
    traced = workload_of_configuration(config, name="smollm2-135m", options=options[0], **shape, **asked)
    found = untraced_workload(WorkloadRequest("smollm2-135m", **shape, options=options[1], **asked))
    assert found is not None
    assert found.profiles != traced.profiles
    assert found.parameters != traced.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_program_equals_traces_of_its_models(name: str) -> None:
    draw = random.Random(name)
    program, _, dtype, *_ = name.split(".")
    found = next(f for f in sized_families(program, DType(dtype)) if name.startswith(f"{program}.{_ends(f.targets)}."))
    is_last_adapted = any(found.targets[-1].endswith(end) for end in ("down_proj", "fc2"))
    packable = is_last_adapted and program not in ("gpt2", "bert")
    for model in draw.sample(found.models, min(3, len(found.models))):
        for how in draw.sample(HOW, 2) if packable else [None]:
            compared(model, draw, how, dtype, found.targets)


def _ends(targets: tuple[str, ...]) -> str:
    return "-".join(target.rpartition(".")[2] for target in targets)


@pytest.mark.slow
def test_a_wrong_program_is_told_from_the_right_one() -> None:
    sized, family = shipped_sized("llama", ALL, DType.BFLOAT16), shipped_family("smollm2-135m", DType.BFLOAT16)
    assert sized is not None
    assert family is not None
    config = model_configuration("smollm2-135m").config
    assert why_not(sized, family, config) is None
    lone, several = sized.pieces
    row = next(n for n, row in enumerate(several.polynomials) if sum(map(abs, row)) == 2)
    wrong = tuple(tuple(2 * c for c in r) if n == row else r for n, r in enumerate(several.polynomials))
    changed = sized.model_copy(update={"pieces": (lone, several.model_copy(update={"polynomials": wrong}))})
    assert "differs" in str(why_not(changed, family, config))


@pytest.mark.slow
def test_a_program_fitted_here_equals_the_trace() -> None:
    config = model_configuration("tinyllama-1.1b").config
    sized = sized_family(config, dtype=DType.FLOAT32, targets=("self_attn.q_proj", "mlp.down_proj"))
    family = shipped_family("tinyllama-1.1b", DType.FLOAT32)
    assert family is not None
    assert why_not(sized, family, config) is None
    shape = {"batch_size": 1, "sequence_length": 41, "rank": 2}
    traced = traced_with_adapters(config, name="x", dtype=DType.FLOAT32, targets=sized.targets, shape=shape)
    assert traced.num_tokens == 41
