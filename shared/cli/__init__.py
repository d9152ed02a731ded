"""The command-line root and what all commands share."""
