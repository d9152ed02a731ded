"""From a model to a Workload or a family of them."""
