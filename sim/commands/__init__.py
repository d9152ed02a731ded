"""search, simulate, advise, hardware, models."""
