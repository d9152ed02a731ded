"""A Schedule on SimPy until it is periodic, and the predicted Record."""
