"""The wrapper's figures under the keys of torch's logging data."""

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from paceline.ddp.exchange.comm_hook import CommHook
from paceline.ddp.exchange.generator_hook import GeneratorHook
from paceline.ddp.reducer.reducer import Reducer
from paceline.tensors.dtensor import local_of

_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_GLOO_ENVIRONMENT = {
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
# torch names data types as its C++ code does.
_TYPES = {
    "torch.float32": "float",
    "torch.float64": "double",
    "torch.float16": "c10::Half",
    "torch.bfloat16": "c10::BFloat16",
    "torch.complex64": "c10::complex<float>",
    "torch.complex128": "c10::complex<double>",
}


def construction_data(module: nn.Module, reducer: Reducer, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """What is known as soon as the module is wrapped."""
    group = reducer.group
    trained = [local_of(parameter) for parameter in parameters if parameter.requires_grad]
    data: dict[str, Any] = {
        "world_size": group.size,
        "rank": group.rank,
        "backend_name": group.backend,
        "module_name": type(module).__name__,
        "dtypes": ", ".join(sorted({_TYPES.get(str(each.dtype), str(each.dtype)) for each in trained})),
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(each.numel() * each.element_size() for each in trained),
        "is_multi_device_module": int(len({each.device for each in trained}) > 1),
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())),
        "bucket_sizes": ", ".join(map(str, reducer.planner.first_sizes)),
        **{key: os.environ.get(name, "N/A") for key, name in _ENVIRONMENT.items()},
    }
    if group.backend == "gloo":
        data |= {key: os.environ.get(name, "N/A") for key, name in _GLOO_ENVIRONMENT.items()}
        data["gloo_num_threads"] = group.gloo_threads
    if isinstance(reducer.exchange, CommHook | GeneratorHook):
        data["comm_hook"] = reducer.exchange.name
    return data
