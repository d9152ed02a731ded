"""What a student is to be beside its teacher: its file, the shapes of its blocks, and what of them is learnt."""
