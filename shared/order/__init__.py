"""What the order of a schedule guarantees for every timing: who comes before whom, and when memory of copies goes."""
