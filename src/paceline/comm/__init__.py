"""Communication between ranks: the only package that calls torch.distributed's collectives."""
