"""DeepSpeed model workers, their Ray groups, and where on the cluster they are placed."""
