"""Which parameters share a chunk, what one rank holds of it, which slot it takes, what Adam needs beside it."""
