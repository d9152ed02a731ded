"""bypass, calibrate, compare, largest, run and validate."""
