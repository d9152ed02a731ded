"""Published runs beside predictions."""
