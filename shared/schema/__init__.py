"""The documents of DESIGN: plan, workload, hardware, calibration, schedule, record; data and validation alone."""
