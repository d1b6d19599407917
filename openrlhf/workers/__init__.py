"""DeepSpeed: the training engine, and the model workers that hold one."""
