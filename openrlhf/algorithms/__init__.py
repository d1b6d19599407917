"""The mathematics of training: pure functions of tensors, free of Ray, DeepSpeed and configuration."""
