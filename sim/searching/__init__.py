"""Branch and bound over one space or several, and its certificate."""
