"""calibrate, compare, and the demo."""
