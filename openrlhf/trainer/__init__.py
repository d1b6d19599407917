"""The loops of the commands that train, evaluation, checkpoints, and the files with metrics."""
