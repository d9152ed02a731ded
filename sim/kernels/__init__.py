"""Compiled twins of three numpy functions that searches spend most time in: replay, guaranteed order, least period."""
