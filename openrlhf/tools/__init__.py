"""The small commands: merging adapters, converting checkpoints, batch inference."""
