"""How long a task takes alone, and how much lanes slow each other."""
