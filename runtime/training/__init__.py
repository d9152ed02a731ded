"""The Schedule interpreted: a training, put together, carried out, and the model given back."""
