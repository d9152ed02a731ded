"""Training for measurements: plainly, or within the budget of a device, and leaving the model as it was found."""
