"""The documents of DESIGN: plan, workload, hardware, schedule, record, answers; data and validation alone."""
