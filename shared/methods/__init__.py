"""Training methods: what each answers to the compiler's three questions, and what its schedules must be."""
