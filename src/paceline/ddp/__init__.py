"""DistributedDataParallel: one process per replica, gradients averaged across ranks while backward runs."""
