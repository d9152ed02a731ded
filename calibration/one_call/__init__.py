"""One call for all of it: the plan of a model on a machine, and a model trained on data by the plan searched for it."""
