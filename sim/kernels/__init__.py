"""Compiled twins of what searches spend most time in: replay, guaranteed order, least period, the caching allocator."""
