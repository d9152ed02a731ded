"""Estimating what tasks cost, from measurements and from what is known before them."""
