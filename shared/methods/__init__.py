"""Training methods: what each answers to the compiler's three questions; and who carries their plans out."""
