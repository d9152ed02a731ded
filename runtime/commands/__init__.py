"""trace and run."""
