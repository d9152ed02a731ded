"""What a run that another tool's file asks for takes as a plan here, and what a searched plan would do for it."""
