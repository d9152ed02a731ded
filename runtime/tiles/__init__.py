"""Parts of a model that run tile by tile over tokens."""
