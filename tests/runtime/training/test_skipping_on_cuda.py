"""Steps that are given up while copies and kernels are still queued, on the stand-in for CUDA that defers them."""

from __future__ import annotations

import torch

from protwin.runtime import carry_out
from tests.proof_size import some_quick
from tests.runtime.models import adamw, snapshot
from tests.runtime.training.test_cuda_ordering import POINTS, STREAMS, backward, cuda_device, plan_of, stand_in


@some_quick("starved", STREAMS, quick=1)
def test_whichever_stream_lags_nothing_of_the_step_is_left(starved: str) -> None:
    plan = plan_of(POINTS, micro_batches=2, n_persist=3)
    model, cuda = POINTS.build(), stand_in(starved)
    with cuda.installed():
        device = cuda_device()
        with carry_out(model, plan, POINTS.workload, optimizer=adamw, device=device, keep_last_step=True) as training:
            for number, batches in enumerate(POINTS.steps(2)):
                for given_up in range(3):
                    loss = POINTS.loss(model, batches[0])
                    if given_up > 0:
                        backward(loss, cuda)
                        loss = POINTS.loss(model, batches[1])
                    if given_up > 1:
                        backward(loss, cuda)
                    del loss
                    training.skip_step()
                assert training.num_iterations == number
                for batch in batches:
                    backward(POINTS.loss(model, batch), cuda)
                training.step()
        cuda.synchronize()
        assert device.pinned.size_bytes == 0
        assert cuda.pinned == {}
    expected = POINTS.plain_with(2, None).weights[-1]
    assert [name for name, value in snapshot(model).items() if not torch.equal(value, expected[name])] == []
