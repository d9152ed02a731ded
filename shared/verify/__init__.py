"""What holds for every timing: the order of events, the guaranteed peak, the proof that a schedule is safe."""
