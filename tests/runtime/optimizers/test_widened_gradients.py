"""The place that gradients are widened into holds the same bits as fresh tensors, in the gradient's strides."""

from __future__ import annotations

import pytest
import torch

from protwin.runtime.optimizers.widened_gradients import WidenedGradients

SHAPES = ((3, 5), (7,), (1,), (0, 4), (2, 3, 4), ())


def drawn(seed: int) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    gradients: list[torch.Tensor | None] = []
    weights = []
    for shape in SHAPES:
        kind = int(torch.randint(0, 5, (), generator=generator))
        value = torch.randn(shape, generator=generator)
        dtype = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.bfloat16)[kind]
        gradient = value.to(dtype)
        if kind == 3 and len(shape) > 1:
            gradient = gradient.transpose(0, 1)
        if kind == 4 and len(shape) > 1:
            gradient = gradient[..., :1].expand(shape)
        gradients.append(None if kind == 1 else gradient)
        weights.append(torch.empty(gradient.shape))
    return gradients, weights


@pytest.mark.parametrize("seed", range(40))
def test_the_bits_and_strides_are_those_of_a_cast(seed: int) -> None:
    place = WidenedGradients()
    for turn in range(3):
        gradients, weights = drawn(100 * seed + turn)
        found = place.of(gradients, weights)
        assert len(found) == len(gradients)
        for gradient, widened in zip(gradients, found, strict=True):
            if gradient is None or widened is None:
                assert widened is gradient
                continue
            expected = gradient.to(torch.float32)
            assert widened.dtype == torch.float32
            assert torch.equal(widened, expected)
            assert widened.stride() == expected.stride()


def test_what_has_the_weights_type_is_itself_and_copies_share_nothing() -> None:
    same, first, second = torch.ones(4), torch.ones(4).bfloat16(), torch.ones(4).bfloat16()
    found = WidenedGradients().of([same, first, second], [torch.empty(4)] * 3)
    assert found[0] is same
    assert found[1] is not None
    assert found[2] is not None
    found[1].zero_()
    assert found[2].eq(1).all()
    assert first.eq(1).all()


def test_a_later_call_takes_no_new_memory_unless_it_needs_more() -> None:
    place = WidenedGradients()

    def where(size: int) -> int:
        (widened,) = place.of([torch.ones(size).bfloat16()], [torch.empty(size)])
        assert widened is not None
        return widened.data_ptr()

    first = where(1000)
    assert where(10) == first
    assert where(1000) == first
