"""Networks for images that others trained on one board, beside what data sheets predict.

Throughput in images per second, of forward, backward and optimizer.  NVIDIA's are of PyTorch in containers of 2020 and
2021: float32 in the usual layout, on an A100 in TF32; mixed precision with channels last.  timm's are of PyTorch 1.12
in mixed precision, in both layouts, with random images that lie on the board; attention was not fused then.
Sources: github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets: resnet50v1.5, resnext101-32x4d and
efficientnet, README, training performance; github.com/huggingface/pytorch-image-models,
results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv.

    python benchmarks/convolutional_networks.py            # all; traces each network, minutes
    python benchmarks/convolutional_networks.py resnet-50
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    is_last: bool
    """Whether channels lie last."""


def _nvidia(network: str, images: int, device: str, mixed: bool, images_per_s: float) -> Measured:
    return Measured(network, images, device, mixed, images_per_s, is_last=mixed)


def _timm(network: str, first: tuple[int, float] | None, last: tuple[int, float] | None) -> tuple[Measured, ...]:
    """Of one network: images in a batch and images per second, with channels first and last."""
    found = ((of, is_last) for of, is_last in ((first, False), (last, True)) if of is not None)
    return tuple(Measured(network, images, "rtx-3090", True, per_s, is_last) for (images, per_s), is_last in found)


MEASURED: Final = (
    _nvidia("resnet-50", 256, "a100-80gb", False, 938),
    _nvidia("resnet-50", 256, "a100-80gb", True, 2470),
    _nvidia("resnet-50", 128, "v100-16gb", False, 367),
    _nvidia("resnet-50", 256, "v100-16gb", True, 1200),
    _nvidia("resnext-101-32x4d", 128, "a100-40gb", False, 300.4),
    _nvidia("resnext-101-32x4d", 128, "a100-40gb", True, 908.4),
    _nvidia("resnext-101-32x4d", 64, "v100-16gb", False, 150.1),
    _nvidia("resnext-101-32x4d", 128, "v100-16gb", True, 534.9),
    _nvidia("efficientnet-b0", 256, "a100-80gb", False, 1078),
    _nvidia("efficientnet-b0", 256, "a100-80gb", True, 2489),
    _nvidia("efficientnet-b0", 128, "v100-16gb", False, 655),
    _nvidia("efficientnet-b0", 256, "v100-16gb", True, 1301),
    _nvidia("efficientnet-b4", 64, "a100-80gb", False, 157),
    _nvidia("efficientnet-b4", 128, "a100-80gb", True, 331),
    _nvidia("efficientnet-b4", 32, "v100-16gb", False, 83),
    _nvidia("efficientnet-b4", 64, "v100-16gb", True, 204),
    *_timm("resnet-18", (512, 2764.22), (512, 3481.78)),
    *_timm("resnet-34", (512, 1622.41), (512, 2036.51)),
    *_timm("resnet-50", (512, 826.06), (512, 1218.01)),
    *_timm("resnext-50-32x4d", (384, 663.39), (384, 1001.03)),
    *_timm("efficientnet-b0", (384, 1459.11), (512, 1751.72)),
    *_timm("mobilenet-v2", (512, 1832.14), (512, 2313.1)),
    *_timm("convnext-tiny", (256, 813.16), (256, 819.24)),
    *_timm("poolformer-s12", (512, 1234.11), (512, 1342.54)),
    *_timm("levit-256", (512, 2482.39), (512, 2956.43)),
    *_timm("vit-tiny", (512, 2293.54), (512, 2299.56)),
    *_timm("vit-small", (384, 1052.92), (384, 1057.92)),
    *_timm("vit-base-32", (512, 1703.57), (512, 1708.63)),
    *_timm("swin-tiny", (256, 646.76), None),
)
"""Batches of EfficientNet are those of the scripts' largest that fit; its page states none."""
_CLASSES: Final = 1000
_WIDTHS: Final = ((128, 256, 1), (256, 512, 2), (512, 1024, 2), (1024, 2048, 2))
"""Of the stages of ResNeXt 32x4d: channels within, channels made, stride (Xie et al., arXiv 1611.05431, table 1)."""


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
    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, given = [], 64
        for number, (within, made, stride) in zip(depths, _WIDTHS, strict=True):
            for index in range(number):
                blocks.append(_Bottleneck(given, within, made, stride if index == 0 else 1))
                given = made
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(given, _CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(pixel_values)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


def _resnet(**sizes: Any) -> nn.Module:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=_CLASSES, **sizes))


def _basic(*depths: int) -> nn.Module:
    return _resnet(layer_type="basic", depths=list(depths), hidden_sizes=[64, 128, 256, 512])


def _vit(width: int, heads: int, patch: int = 16) -> nn.Module:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width, "patch_size": patch}
    config = transformers.ViTConfig(num_labels=_CLASSES, attn_implementation="eager", **sizes)
    return transformers.ViTForImageClassification(config)


def _levit() -> nn.Module:
    sizes = {"hidden_sizes": [256, 384, 512], "num_attention_heads": [4, 6, 8], "key_dim": [32, 32, 32]}
    config = transformers.LevitConfig(num_labels=_CLASSES, depths=[4, 4, 4], **sizes)
    return transformers.LevitForImageClassificationWithTeacher(config)


def _efficientnet(**sizes: Any) -> nn.Module:
    config = transformers.EfficientNetConfig(num_labels=_CLASSES, **sizes)
    return transformers.EfficientNetForImageClassification(config)


_NETWORKS: Final[dict[str, tuple[Callable[[], nn.Module], int]]] = {
    "resnet-18": (lambda: _basic(2, 2, 2, 2), 224),
    "resnet-34": (lambda: _basic(3, 4, 6, 3), 224),
    "resnet-50": (_resnet, 224),
    "resnext-50-32x4d": (lambda: _ResNeXt((3, 4, 6, 3)), 224),
    "resnext-101-32x4d": (lambda: _ResNeXt((3, 4, 23, 3)), 224),
    "mobilenet-v2": (
        lambda: transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(num_labels=_CLASSES)),
        224,
    ),
    "convnext-tiny": (
        lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=_CLASSES)),
        224,
    ),
    "poolformer-s12": (
        lambda: transformers.PoolFormerForImageClassification(transformers.PoolFormerConfig(num_labels=_CLASSES)),
        224,
    ),
    "swin-tiny": (
        lambda: transformers.SwinForImageClassification(
            transformers.SwinConfig(num_labels=_CLASSES, attn_implementation="eager")
        ),
        224,
    ),
    "levit-256": (_levit, 224),
    "vit-tiny": (lambda: _vit(192, 3), 224),
    "vit-small": (lambda: _vit(384, 6), 224),
    "vit-base-32": (lambda: _vit(768, 12, 32), 224),
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
    layout = torch.channels_last if run.is_last else torch.contiguous_format
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
    errors: dict[str, list[float]] = {}
    print("| network | board | precision | channels | images/s, measured | predicted | error of time |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: |")
    for run in MEASURED:
        if run.network not in asked:
            continue
        predicted = images_per_s(run, traced(run), device_part(run.device))
        error = run.images_per_s / predicted - 1
        errors.setdefault(run.device, []).append(error)
        precision = "mixed" if run.mixed else "TF32" if run.device.startswith("a100") else "float32"
        channels = "last" if run.is_last else "first"
        print(
            f"| {run.network} | {run.device} | {precision} | {channels} | {run.images_per_s:,.0f} | {predicted:,.0f} "
            f"| {error:+.0%} |"
        )
    for device, found in errors.items():
        print(f"\n{device}: mean {fmean(found):+.1%}, mean size {fmean(map(abs, found)):.1%}")


if __name__ == "__main__":
    main()
