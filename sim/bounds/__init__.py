"""What no plan can beat: lower bounds of time and memory, and the replay of many plans at once."""
