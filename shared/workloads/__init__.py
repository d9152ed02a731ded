"""Where a Workload comes from: observations of a trace, a family of polynomials, a file, a name, the cache."""
