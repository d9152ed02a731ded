"""The Schedule interpreted: Training and its lanes."""
