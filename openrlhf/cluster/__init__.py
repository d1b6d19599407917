"""Ray: the cluster, where roles are placed on it, and the groups of processes that they are."""
