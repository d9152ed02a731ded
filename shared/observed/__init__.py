"""What a trace sees of the sections of an iteration."""
