"""The c10d backend "paceline": torch.distributed's collectives in shared memory."""
