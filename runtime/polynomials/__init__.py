"""From a model to its family of workloads: traces at a few shapes, and polynomials through them."""
