"""calibrate, compare, largest, and the demo."""
