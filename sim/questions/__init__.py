"""Questions beyond one search: what if, what would help, which machine to rent."""
