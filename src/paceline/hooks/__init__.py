"""What is done to a full bucket: communication hooks for ``register_comm_hook(None, hook)``.

For example::

    ddp.register_comm_hook(None, paceline.hooks.int8())

Each says what it sends and which error it makes. Where ranks share memory, those that compress see only what
crosses hosts: the world size they speak of is the number of hosts then, and a rank sends its part of the
parameters.
"""

from paceline.hooks.average import average
from paceline.hooks.compressed import bf16, fp16, int4, int8, top_k, with_error_feedback
from paceline.hooks.compressors import Compressor
from paceline.hooks.hook import Hook
from paceline.hooks.local_sgd import PostLocalSGD, post_local_sgd
from paceline.hooks.power_sgd import power_sgd

__all__ = [
    "Compressor",
    "Hook",
    "PostLocalSGD",
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
