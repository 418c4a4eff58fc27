"""DistributedDataParallel: one process per replica, gradients averaged across ranks while backward runs.

docs/how-it-works.md follows one gradient through the functions of this package.
"""
