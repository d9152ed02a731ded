"""Tracing with time a model that does not fit on its device, and leaving it as it was found."""
