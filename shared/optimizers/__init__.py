"""What optimizers keep beside weights, move and may step, tensor by tensor."""
