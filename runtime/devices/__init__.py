"""Where a schedule runs: devices, their memory, lanes and clocks, and measuring them."""
