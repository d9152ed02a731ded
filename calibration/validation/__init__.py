"""Judging predictions: random plans of a model, predicted and measured side by side on one machine."""
