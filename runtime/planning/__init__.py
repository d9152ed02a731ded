"""From a model, a batch and a budget to the workload, the machine and the plan that training begins with."""
