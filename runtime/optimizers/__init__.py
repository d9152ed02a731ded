"""What steps weights, with which options, and when it may not."""
