"""Bypass runs: from the folder of a teacher to the folder of its trained student, resumable at any moment."""
