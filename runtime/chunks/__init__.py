"""Parameters in flat buffers that come and go."""
