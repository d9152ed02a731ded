"""Convolutional networks that NVIDIA trained on one board, beside what data sheets predict.

Throughput in images per second, of PyTorch in containers of 2020 and 2021: float32 in the usual layout, on an A100 in
TF32; mixed precision with channels last.
Sources: github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets: resnet50v1.5, resnext101-32x4d and
efficientnet, README, training performance.

    python benchmarks/convolutional_networks.py            # all; traces each network, some seconds
    python benchmarks/convolutional_networks.py resnet-50
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import nn

from protwin.runtime import trace
from protwin.shared.catalogue.parts import device_part
from protwin.shared.schema.hardware import Device
from protwin.shared.schema.workload import Workload
from protwin.sim.operations.roofline import roofline_s


class Measured(NamedTuple):
    """One published training."""

    network: str
    images: int
    """In a batch."""
    device: str
    mixed: bool
    images_per_s: float


MEASURED: Final = (
    Measured("resnet-50", 256, "a100-80gb", False, 938),
    Measured("resnet-50", 256, "a100-80gb", True, 2470),
    Measured("resnet-50", 128, "v100-16gb", False, 367),
    Measured("resnet-50", 256, "v100-16gb", True, 1200),
    Measured("resnext-101-32x4d", 128, "a100-40gb", False, 300.4),
    Measured("resnext-101-32x4d", 128, "a100-40gb", True, 908.4),
    Measured("resnext-101-32x4d", 64, "v100-16gb", False, 150.1),
    Measured("resnext-101-32x4d", 128, "v100-16gb", True, 534.9),
    Measured("efficientnet-b0", 256, "a100-80gb", False, 1078),
    Measured("efficientnet-b0", 256, "a100-80gb", True, 2489),
    Measured("efficientnet-b0", 128, "v100-16gb", False, 655),
    Measured("efficientnet-b0", 256, "v100-16gb", True, 1301),
    Measured("efficientnet-b4", 64, "a100-80gb", False, 157),
    Measured("efficientnet-b4", 128, "a100-80gb", True, 331),
    Measured("efficientnet-b4", 32, "v100-16gb", False, 83),
    Measured("efficientnet-b4", 64, "v100-16gb", True, 204),
)
"""Batches of EfficientNet are those of the scripts' largest that fit; its page states none."""
_CLASSES: Final = 1000
_STAGES: Final = ((3, 128, 256, 1), (4, 256, 512, 2), (23, 512, 1024, 2), (3, 1024, 2048, 2))
"""Of ResNeXt-101: blocks, channels within, channels made, stride (Xie et al., arXiv 1611.05431, table 1)."""


class _Bottleneck(nn.Module):
    def __init__(self, given: int, within: int, made: int, stride: int) -> None:
        super().__init__()
        self.reduced = nn.Sequential(nn.Conv2d(given, within, 1, bias=False), nn.BatchNorm2d(within), nn.ReLU(True))
        grouped = nn.Conv2d(within, within, 3, stride, 1, groups=32, bias=False)
        self.grouped = nn.Sequential(grouped, nn.BatchNorm2d(within), nn.ReLU(True))
        self.expanded = nn.Sequential(nn.Conv2d(within, made, 1, bias=False), nn.BatchNorm2d(made))
        shortcut = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        self.shortcut = shortcut if stride > 1 or given != made else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.expanded(self.grouped(self.reduced(images))) + self.shortcut(images))


class _ResNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, given = [], 64
        for number, within, made, stride in _STAGES:
            for index in range(number):
                blocks.append(_Bottleneck(given, within, made, stride if index == 0 else 1))
                given = made
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(given, _CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(pixel_values)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


def _efficientnet(**sizes: Any) -> nn.Module:
    config = transformers.EfficientNetConfig(num_labels=_CLASSES, **sizes)
    return transformers.EfficientNetForImageClassification(config)


_NETWORKS: Final[dict[str, tuple[Callable[[], nn.Module], int]]] = {
    "resnet-50": (
        lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=_CLASSES)),
        224,
    ),
    "resnext-101-32x4d": (_ResNeXt, 224),
    "efficientnet-b0": (
        lambda: _efficientnet(image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
        224,
    ),
    "efficientnet-b4": (
        lambda: _efficientnet(image_size=380, width_coefficient=1.4, depth_coefficient=1.8, hidden_dim=1792),
        380,
    ),
}
"""How each is built, and the width of its images."""


def traced(run: Measured) -> Workload:
    """One iteration of ``run``, with fake tensors."""
    build, width = _NETWORKS[run.network]
    layout = torch.channels_last if run.mixed else torch.contiguous_format
    with torch.device("meta"):
        model = build().to(memory_format=layout)  # type: ignore[call-overload]
        images = torch.empty(run.images, 3, width, width).to(memory_format=layout)

    def loss(output: Any, _: Any) -> torch.Tensor:
        logits: torch.Tensor = getattr(output, "logits", output)
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))

    with torch.autocast("cpu", torch.float16) if run.mixed else nullcontext():
        return trace(model, {"pixel_values": images}, loss=loss)


def images_per_s(run: Measured, workload: Workload, device: Device) -> float:
    """Throughput of forward and backward."""
    outside = (workload.prologue_forward, workload.epilogue_forward)
    phases = [*outside, workload.prologue_backward, workload.epilogue_backward]
    for block in workload.blocks:
        profile = workload.profiles[block.profile]
        phases += [profile.forward, profile.backward]
    return run.images / sum(roofline_s(phase, device) for phase in phases)


def main() -> None:
    """Print the table."""
    asked = sys.argv[1:] or list(_NETWORKS)
    errors = []
    print("| network | board | precision | images/s, measured | predicted | error of time |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for run in MEASURED:
        if run.network not in asked:
            continue
        predicted = images_per_s(run, traced(run), device_part(run.device))
        errors.append(run.images_per_s / predicted - 1)
        precision = "mixed" if run.mixed else "TF32" if run.device.startswith("a100") else "float32"
        print(
            f"| {run.network} | {run.device} | {precision} | {run.images_per_s:,.0f} | {predicted:,.0f} "
            f"| {errors[-1]:+.0%} |"
        )
    print(f"\nmean {fmean(errors):+.1%}, mean size {fmean(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
