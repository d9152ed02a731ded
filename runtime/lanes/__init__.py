"""The lanes of a training: what each of them does, when it may start, and how far the iteration is."""
