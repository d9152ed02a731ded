"""What is known by name, machines and models, and how a machine is changed, checked and shared among ranks."""
