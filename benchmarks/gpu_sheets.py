"""What training of catalogue models takes on one GPU, kernel by kernel, beside what its data sheet predicts.

Measures, within ``--minutes``:

- Sustained products: one product of bfloat16 for half a minute, with the board's power and clock meanwhile.
- Kernels by themselves: attention, norms, the loss over a vocabulary, optimizers, copies on the device.
- Training steps of plain loops: seconds, allocated and reserved peaks, power, and every kernel's time in one step.

``python benchmarks/gpu_sheets.py`` writes ``benchmarks/results/sheets-DATE.json``, also into $OUT if that is set.
``python benchmarks/sheet_predictions.py FILE`` adds what the simulator says of each training; that needs no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

MINUTES: Final = 3.0
_TRILLION: Final = 1e12
_WARM_UP: Final = 3
_PROFILED_KERNELS: Final = 60
_PRODUCTS: Final = (
    (8192, 8192, 8192),
    (8192, 2048, 2048),
    (8192, 8192, 2048),
    (8192, 2048, 8192),
    (8192, 128256, 2048),
    (4096, 4096, 4096),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (2048, 4096, 4096),
    (2048, 1024, 4096),
    (512, 4864, 896),
    (4096, 16, 4096),
    (4096, 4096, 16),
)
"""Rows, columns and the dimension that is summed over."""
_BACKENDS: Final = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@dataclass(frozen=True)
class Step:
    """One training whose steps are measured."""

    model: str
    batch_size: int
    sequence_length: int
    dtype: str = "bfloat16"
    autocast: str | None = None
    lora_rank: int | None = None
    checkpointed: bool = False
    sharded: bool = False
    """By FSDP2 over one rank, computing in bfloat16: what its copies take where no link does."""
    optimizer: str = "adamw-bf16"

    @property
    def name(self) -> str:
        """What is trained how."""
        words = [self.model, f"{self.batch_size} x {self.sequence_length}", self.dtype]
        words += [f"autocast {self.autocast}"] if self.autocast else []
        words += [f"LoRA {self.lora_rank}"] if self.lora_rank else []
        words += ["checkpointed"] if self.checkpointed else []
        words += ["FSDP2 on one rank"] if self.sharded else []
        return ", ".join(words)


STEPS: Final = (
    Step("llama-3.2-1b", 4, 2048, dtype="float32", sharded=True, optimizer="adamw"),
    Step("gpt2-xl", 4, 1024, dtype="float32", autocast="bfloat16", optimizer="adamw"),
    Step("bert-large", 16, 384, dtype="float32", autocast="float16", optimizer="adamw"),
    Step("qwen2.5-0.5b", 1, 512),
    Step("t5-large", 8, 512, dtype="float32", optimizer="adamw"),
    Step("llama-3-8b", 1, 8192, lora_rank=16, checkpointed=True),
    Step("gpt2-medium", 8, 1024, dtype="float32", optimizer="adamw"),
    Step("mistral-7b", 1, 4096, lora_rank=64),
    Step("qwen2.5-1.5b", 8, 1024),
    Step("qwen3-4b", 2, 2048, checkpointed=True),
    Step("llama-3.2-1b", 4, 2048),
    Step("llama-3.2-1b", 1, 16384),
    Step("llama-3.2-3b", 4, 2048, checkpointed=True),
    Step("llama-3-8b", 2, 2048, lora_rank=16),
)


class Watch:
    """Power and clock of the board while something runs."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._library = pynvml
        self._board = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples: list[tuple[float, float, int, int]] = []

    def limit_w(self) -> float:
        """The limit of the board's power."""
        return float(self._library.nvmlDeviceGetEnforcedPowerLimit(self._board)) / 1000

    @contextmanager
    def watching(self) -> Iterator[list[tuple[float, float, int, int]]]:
        """Collect (seconds, W, MHz, °C) ten times a second."""
        samples: list[tuple[float, float, int, int]] = []
        is_done = threading.Event()
        start = time.perf_counter()

        def look() -> None:
            library, board = self._library, self._board
            while not is_done.wait(0.1):
                samples.append(
                    (
                        round(time.perf_counter() - start, 3),
                        library.nvmlDeviceGetPowerUsage(board) / 1000,
                        library.nvmlDeviceGetClockInfo(board, library.NVML_CLOCK_SM),
                        library.nvmlDeviceGetTemperature(board, library.NVML_TEMPERATURE_GPU),
                    )
                )

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield samples
        finally:
            is_done.set()
            thread.join()


def seconds_of(work: Callable[[], Any], *, least_s: float = 0.15, most: int = 200) -> float:
    """Median seconds of ``work`` on the device, by events, after warming up."""
    for _ in range(_WARM_UP):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    while len(marks) <= most and (len(marks) < 6 or time.perf_counter() - start < least_s):
        work()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def sustained(watch: Watch, seconds: float, *, fill: str) -> dict[str, Any]:
    """A product of 8192 cubed in bfloat16, over and over: rate, power and clock by the second."""
    size = 8192
    make = {"random": torch.randn, "zeros": torch.zeros, "uniform": torch.rand}[fill]
    left, right = (make(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    rates: list[tuple[float, float]] = []
    with watch.watching() as samples:
        start = time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            for _ in range(200):
                torch.mm(left, right, out=out)
            torch.cuda.synchronize()
            rates.append((now - start, 200 * 2 * size**3 / (time.perf_counter() - now) / _TRILLION))
    return {
        "what": f"{size} cubed, bfloat16, {fill}",
        "tflop_per_s": [[round(when, 2), round(rate, 1)] for when, rate in rates],
        "board": samples[:: max(1, len(samples) // 60)],
    }


def kernels() -> Iterator[dict[str, Any]]:
    """Kernels by themselves: seconds, and the rate in FLOP/s or bytes/s that these are."""
    for rows in (_products, _attention, _streams, _losses, _optimizers):
        yield from rows()
        gc.collect()
        torch.cuda.empty_cache()


def _row(what: str, work: Callable[[], Any], *, flops: float = 0.0, size_bytes: float = 0.0) -> dict[str, Any]:
    found: dict[str, Any] = {"what": what}
    try:
        found["seconds"] = seconds = seconds_of(work)
    except RuntimeError as error:  # a backend that this board or shape has none of
        return found | {"refused": str(error)[:200]}
    if flops:
        found["tflop_per_s"] = flops / seconds / _TRILLION
    if size_bytes:
        found["tb_per_s"] = size_bytes / seconds / _TRILLION
    return found


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=requires_grad)


def _products() -> Iterator[dict[str, Any]]:
    for rows, columns, shared in _PRODUCTS:
        inputs, weight, gradient = _random(rows, shared), _random(columns, shared), _random(rows, columns)
        flops, what = 2.0 * rows * columns * shared, f"product {rows} x {columns} x {shared}"
        yield _row(f"{what}, forward", partial(functional.linear, inputs, weight), flops=flops)
        yield _row(f"{what}, of the input", partial(torch.mm, gradient, weight), flops=flops)
        yield _row(f"{what}, of the weight", partial(torch.mm, gradient.t(), inputs), flops=flops)


def _attention() -> Iterator[dict[str, Any]]:
    def forward(backend: SDPBackend, *inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*inputs, is_causal=True)

    for shape in ((4, 32, 2048, 128), (4, 32, 2048, 64), (1, 32, 8192, 128), (1, 32, 32768, 128)):
        inputs = [_random(*shape, requires_grad=True) for _ in range(3)]
        gradient = _random(*shape)
        batch, heads, length, width = shape
        flops = 2.0 * batch * heads * length**2 * width  # half of the square
        for backend in _BACKENDS:
            if backend is SDPBackend.MATH and length > 2048:
                continue
            what = f"attention {shape}, {backend.name.lower()}"
            found = _row(f"{what}, forward", partial(forward, backend, *inputs), flops=flops)
            yield found
            if "refused" not in found:
                backward = partial(torch.autograd.grad, forward(backend, *inputs), inputs, gradient, retain_graph=True)
                yield _row(f"{what}, backward", backward, flops=2.5 * flops)


def _streams() -> Iterator[dict[str, Any]]:
    hidden, weight = _random(8192, 4096), _random(4096)
    wide, narrow_bytes = hidden.float(), 2.0 * hidden.numel()
    yield _row("add, bfloat16", lambda: hidden + hidden, size_bytes=2 * narrow_bytes)
    yield _row("cast bfloat16 to float32", hidden.float, size_bytes=3 * narrow_bytes)
    yield _row("add, float32", lambda: wide + wide, size_bytes=4 * narrow_bytes)
    yield _row("squares, float32", partial(wide.pow, 2), size_bytes=4 * narrow_bytes)
    yield _row("mean over rows, float32", partial(wide.mean, -1), size_bytes=2 * narrow_bytes)
    yield _row("silu, bfloat16", partial(functional.silu, hidden), size_bytes=2 * narrow_bytes)
    norm = partial(functional.layer_norm, hidden, (4096,), weight)
    yield _row("layer_norm, bfloat16", norm, size_bytes=2 * narrow_bytes)
    yield _row("transposing copy", hidden.t().contiguous, size_bytes=2 * narrow_bytes)
    tiny = torch.ones(16, device="cuda")
    start = time.perf_counter()
    for _ in range(5000):
        tiny.mul_(1.0)
    torch.cuda.synchronize()
    yield {"what": "operation that does nothing, in a row", "seconds": (time.perf_counter() - start) / 5000}


def _losses() -> Iterator[dict[str, Any]]:
    logits = _random(4096, 128256, dtype=torch.float32, requires_grad=True)
    labels = torch.randint(0, 128256, (4096,), device="cuda")
    size_bytes = 4.0 * logits.numel()
    loss = functional.cross_entropy(logits, labels)
    yield _row(
        "cross entropy, float32, forward", partial(functional.cross_entropy, logits, labels), size_bytes=3 * size_bytes
    )
    yield _row(
        "cross entropy, float32, backward",
        partial(torch.autograd.grad, loss, logits, retain_graph=True),
        size_bytes=2 * size_bytes,
    )
    table = _random(128256, 2048, requires_grad=True)
    found = functional.embedding(labels, table)
    yield _row(
        "embedding, 4096 of 128256 x 2048, backward",
        partial(torch.autograd.grad, found, table, torch.randn_like(found), retain_graph=True),
        size_bytes=2.0 * table.numel(),
    )


def _optimizers() -> Iterator[dict[str, Any]]:
    for dtype, moved in ((torch.float32, 28), (torch.bfloat16, 14)):
        for is_fused in (True, False):
            parameters = [nn.Parameter(_random(2048, 8192, dtype=dtype)) for _ in range(24)]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer = torch.optim.AdamW(parameters, fused=is_fused, foreach=None if is_fused else True)
            size_bytes = float(moved * sum(parameter.numel() for parameter in parameters))
            how = "fused" if is_fused else "foreach"
            yield _row(f"AdamW, {dtype}, {how}", optimizer.step, size_bytes=size_bytes)


def trained(step: Step, watch: Watch, *, least_s: float) -> dict[str, Any]:
    """Measure one training: steps in a row, then one under the profiler."""
    from transformers.initialization import no_init_weights

    from protwin.runtime.model.adapters import add_lora
    from protwin.runtime.model.batches import loss_of
    from protwin.runtime.model.configurations import build_model, training_dtype
    from protwin.runtime.model.snapshot import without_cache
    from protwin.runtime.tracing.configurations import batch_of
    from protwin.shared.catalogue.models import model_configuration

    configuration = model_configuration(step.model).config
    before_bytes = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    with no_init_weights():
        model = build_model(configuration, step.model, training_dtype(configuration, step.dtype), device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if step.lora_rank is not None:
        add_lora(model, rank=step.lora_rank, device=torch.device("cuda"))
    if step.sharded:
        _shard(model)
    model.train()
    if step.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    length = step.sequence_length
    given = {"batch_size": step.batch_size, "sequence_length": length, "target_length": length}
    batch = {name: _filled(name, tensor, model) for name, tensor in batch_of(model, given).items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)

    def train() -> None:
        context = torch.autocast("cuda", getattr(torch, step.autocast)) if step.autocast else nullcontext()
        with context:
            loss = loss_of(model, batch, None)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    with without_cache(model):
        torch.cuda.synchronize()
        built_s = time.perf_counter() - begun
        for _ in range(_WARM_UP):
            train()
        torch.cuda.synchronize()
        warm_s = time.perf_counter() - begun - built_s
        torch.cuda.reset_peak_memory_stats()
        with watch.watching() as samples:
            start = time.perf_counter()
            marks = [torch.cuda.Event(enable_timing=True)]
            marks[0].record()
            while len(marks) < 9 or time.perf_counter() - start < least_s:
                train()
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            dispatched_s = time.perf_counter() - start
            torch.cuda.synchronize()
            wall_s = time.perf_counter() - start
        each = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
        memory = torch.cuda.memory_stats()
        found = asdict(step) | {
            "name": step.name,
            "seconds": statistics.median(each[2:]),
            "all_seconds": [round(value, 5) for value in each[:200]],
            "steps": len(each),
            "wall_s": wall_s,
            "built_s": built_s,
            "warm_s": warm_s,
            "dispatched_s": dispatched_s,
            "before_bytes": before_bytes,
            "allocated_bytes": memory["allocated_bytes.all.peak"],
            "requested_bytes": memory["requested_bytes.all.peak"],
            "reserved_bytes": memory["reserved_bytes.all.peak"],
            "power_w": statistics.median(sample[1] for sample in samples) if samples else None,
            "clock_mhz": statistics.median(sample[2] for sample in samples) if samples else None,
        }
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            train()
            torch.cuda.synchronize()
    found["kernels"] = _kernel_rows(profile)
    found["measured_in_s"] = time.perf_counter() - begun
    return found


def _shard(model: Any) -> None:
    from torch import distributed
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from protwin.runtime.model.blocks import find_blocks

    if not distributed.is_initialized():
        distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in find_blocks(model):
        fully_shard(block.module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _kernel_rows(profile: Any) -> list[list[Any]]:
    """Of one step: name, calls and microseconds of the kernels that took the most, and the rest as one."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            entry = seconds[event.name[:160]]
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us()
    rows = sorted(([name, int(calls), round(us, 1)] for name, (calls, us) in seconds.items()), key=lambda r: -r[2])
    rest = rows[_PROFILED_KERNELS:]
    return [*rows[:_PROFILED_KERNELS], ["rest", sum(r[1] for r in rest), round(sum(r[2] for r in rest), 1)]]


def _filled(name: str, tensor: torch.Tensor, model: Any) -> torch.Tensor:
    """A tensor of that shape on the device, with values that the model takes."""
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, device="cuda", dtype=tensor.dtype)
    if name.endswith("mask"):
        return torch.ones(tensor.shape, device="cuda", dtype=tensor.dtype)
    is_class = name == "labels" and tensor.dim() == 1
    most = getattr(model.config, "num_labels", 2) if is_class else model.config.get_text_config().vocab_size
    return torch.randint(0, 2 if "type" in name else most, tensor.shape, device="cuda", dtype=tensor.dtype)


def main() -> int:
    """Measure within the time, writing after every part; exit code 2 without a GPU, 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time for everything ({MINUTES})")
    parser.add_argument("--sustained-s", type=float, default=20.0, help="seconds of the sustained product (20)")
    parser.add_argument("--step-s", type=float, default=2.0, help="least seconds of every training (2)")
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    parser.add_argument("--steps-only", action="store_true", help="trainings alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_sheets.py needs a CUDA device; torch sees none here, so nothing was measured.", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes
    watch = Watch()
    now = datetime.datetime.now(datetime.UTC)
    result: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name(0),
        "power_limit_w": watch.limit_w(),
        "torch": torch.__version__,
        "steps": [],
        "kernels": [],
        "sustained": [],
        "failed": [],
    }

    def kept(key: str, name: str, work: Callable[[], Any]) -> None:
        if time.monotonic() > end:
            result["failed"].append([name, "no time was left"])
            return
        try:
            result[key].append(work())
        except Exception as error:
            result["failed"].append([name, f"{type(error).__name__}: {error}"[:500]])
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        content = json.dumps(result)
        folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
        (folder / f"sheets-{now.date().isoformat()}.json").write_text(content + "\n")

    if not options.steps_only:
        for fill, seconds in (("random", options.sustained_s), ("zeros", options.sustained_s / 5)):
            kept("sustained", fill, lambda fill=fill, seconds=seconds: sustained(watch, seconds, fill=fill))
        kept("kernels", "kernels", lambda: list(kernels()))
    for step in STEPS:
        if options.only in step.name:
            kept("steps", step.name, lambda step=step: trained(step, watch, least_s=options.step_s))
            last = result["steps"][-1] if result["steps"] else {}
            print(step.name, *(last.get(key) for key in ("seconds", "built_s", "warm_s", "measured_in_s")), flush=True)
    print(len(result["failed"]), "failed", result["failed"])
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
