"""Everything in words and tables, for a terminal and for a page."""
