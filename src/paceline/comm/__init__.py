"""Communication between ranks: the only package that imports torch.distributed."""
