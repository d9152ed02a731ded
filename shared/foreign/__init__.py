"""Configuration files of other tools, read into one description of the training that they ask for."""
