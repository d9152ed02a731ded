"""The space of plans as numpy arrays: knobs, what chunks and positions cost, what lanes wait for."""
