"""Sweeps over shapes of the batch: the plan of every point, where offloading becomes free, and their page."""
