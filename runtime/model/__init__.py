"""The user's model and batches: built, found, adapted, owned, left as found."""
