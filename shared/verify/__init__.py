"""What holds for every timing: the guaranteed peak, the proof that a schedule is safe."""
