"""Many plans' schedules in the making: tasks and buffers in groups, as arrays, and the lanes that follow from them."""
