"""A student made of its teacher: built block by block, initialised from the teacher's values, saved and loaded."""
