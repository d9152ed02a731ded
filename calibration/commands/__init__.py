"""bypass, calibrate, compare, largest, and the demos."""
