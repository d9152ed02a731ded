"""Questions that take several searches: what if, which machine to rent."""
