"""bypass, calibrate, compare, largest, validate, and the demos."""
