"""What a bypass run is known by, the folder that it lives in, and sweeps of runs."""
