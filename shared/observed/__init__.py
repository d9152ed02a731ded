"""What a trace sees of the sections of an iteration, and the workload that it is put together to."""
