"""Seconds of single operations on a device, from its data sheet and their shapes."""
