"""Communication hooks for ``register_comm_hook(None, hook)``: how full buckets are averaged.

For example::

    ddp.register_comm_hook(None, paceline.hooks.int8())

Each says what it sends and what error it makes. If ranks share memory, hooks that compress see only traffic
between hosts: then the world size in their formulas is the number of hosts, and each rank of a host sends its
part of the parameters.
"""

from paceline.hooks.auto import Auto, auto
from paceline.hooks.compressed import bf16, fp16, int4, int8, top_k, with_error_feedback
from paceline.hooks.compressors import Compressor
from paceline.hooks.hook import Hook, average
from paceline.hooks.local_sgd import PostLocalSGD, post_local_sgd
from paceline.hooks.power_sgd import power_sgd

__all__ = [
    "Auto",
    "Compressor",
    "Hook",
    "PostLocalSGD",
    "auto",
    "average",
    "bf16",
    "fp16",
    "int4",
    "int8",
    "post_local_sgd",
    "power_sgd",
    "top_k",
    "with_error_feedback",
]
