"""What can be read off a Record: comparison, waits, memory by content, the trace for Perfetto."""
