"""What everything stands on: errors, units, documents on disk, and small courtesies."""
