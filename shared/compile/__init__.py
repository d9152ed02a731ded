"""From a Plan to its Schedule; all policy."""
