"""Memory beyond the schedule: PyTorch's allocator, libraries, the host process."""
