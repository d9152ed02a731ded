"""What a stretch of the compute lane does: element types, operations, phases, and the losses of distillation."""
