"""The fused cross-entropy on a GPU: torch's values, in the memory of the logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from protwin.runtime.tiles.fused_cross_entropy import fused_cross_entropy
from protwin.shared.observed.fused_loss import SCRATCH_BYTES
from tests.gpu.subject import DEVICE

pytestmark = pytest.mark.gpu

NUM_TOKENS, VOCABULARY = 4096, 32000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_torch_and_memory_is_that_of_the_logits(dtype: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(NUM_TOKENS, VOCABULARY, generator=generator, device=DEVICE).to(dtype)
    labels = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator, device=DEVICE)
    labels[::7] = -100
    one = logits.clone().requires_grad_()
    wanted = functional.cross_entropy(one.float(), labels)
    wanted.backward()
    assert one.grad is not None
    gradient, one = one.grad, logits.clone().requires_grad_()
    made = one * 1
    kept: list[torch.Tensor] = []
    made.register_hook(lambda found: kept.append(found.clone()))
    torch.cuda.synchronize(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    found = fused_cross_entropy(made, labels)
    forward_bytes = torch.cuda.max_memory_allocated(DEVICE) - before
    assert forward_bytes <= SCRATCH_BYTES + 64 * NUM_TOKENS + 2**21, "nothing as large as the logits is made"
    found.backward()
    torch.testing.assert_close(found, wanted)
    # A gradient of 16 bit is rounded once, here and there.
    spacing = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(dtype, 1e-4)
    torch.testing.assert_close(kept[0], gradient, rtol=spacing, atol=1e-7)
