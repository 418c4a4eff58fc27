"""torch's logging data: what the wrapper knows about itself, under torch's keys.

Also the environment, which torch prints on request: here it is in the log ``paceline`` at debug level.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from paceline.ddp.exchange.chosen import ChosenExchange
from paceline.ddp.exchange.comm_hook import FutureHookExchange
from paceline.ddp.exchange.generator_hook import GeneratorHookExchange
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.state.wrapped_module import WrappedModule
from paceline.errors import OptionError
from paceline.options import WrapperOptions
from paceline.tensors.dtensor import local_of
from paceline.tracing import untraced

_LOG = logging.getLogger("paceline")
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("GLOO_", "NCCL_", "PACELINE_", "TORCH_DISTRIBUTED_", "TORCH_NCCL_")

_ENVIRONMENT_KEYS = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_GLOO_KEYS = {
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
_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)
_ALWAYS_SAMPLED = 10


class LoggingData:
    """One wrapper's logging data.

    Run-time figures are sampled: in each of the first ten iterations, then once every ``sample_rate``.

    Args:
        wrapped: the wrapper's module.
        reducer: the wrapper's.
        options: what the wrapper was asked for.

    Attributes:
        joins_uneven_inputs: whether a join context was entered.
    """

    def __init__(self, wrapped: WrappedModule, reducer: Reducer, options: WrapperOptions) -> None:
        self._wrapped = wrapped
        self._reducer = reducer
        self._options = options
        self._sample_rate = 100
        self._iteration = 0
        self._samples = 0
        self._sums = dict.fromkeys(_AVERAGED, 0)
        self._sampled: dict[str, Any] = {"iteration": 0}
        self.joins_uneven_inputs = False

    def set_sample_rate(self, sample_rate: int) -> None:
        """Sample once in that many iterations."""
        if sample_rate < 1:
            raise OptionError(f"the sample rate must be at least 1 (sample_rate: {sample_rate})")
        self._sample_rate = sample_rate

    def begin_forward(self) -> None:
        """A synced forward begins: sample the iteration that has ended, if it is its turn."""
        ended = self._iteration
        if ended and (ended <= _ALWAYS_SAMPLED or ended % self._sample_rate == 0):
            self._sampled = self._sample()
        self._iteration += 1

    @contextlib.contextmanager
    @untraced
    def noting_errors(self) -> Iterator[None]:
        """Keep the text of an error that is raised in here."""
        try:
            yield
        except Exception as error:
            self._reducer.last_error = f"{type(error).__name__}: {error}"
            raise

    def data(self, **settings: Any) -> dict[str, Any]:
        """Everything, with the wrapper's present settings under torch's keys."""
        return {
            **self._of_the_group(),
            **self._of_the_module(),
            "bucket_cap_bytes": self._options.caps.cap,
            "bucket_sizes": ", ".join(map(str, self._reducer.planner.first_sizes)),
            "find_unused_parameters": int(self._options.find_unused_parameters),
            "gradient_as_bucket_view": int(self._options.gradient_as_bucket_view),
            "join_uneven_inputs": int(self.joins_uneven_inputs),
            **settings,
            **self._sampled,
            **self._last_error(),
        }

    def _of_the_group(self) -> dict[str, Any]:
        group = self._reducer.group
        data = {
            "world_size": group.size,
            "rank": group.rank,
            "backend_name": group.backend,
            **{key: os.environ.get(name, "N/A") for key, name in _ENVIRONMENT_KEYS.items()},
        }
        if group.backend == "gloo":
            data |= {key: os.environ.get(name, "N/A") for key, name in _GLOO_KEYS.items()}
            data["gloo_num_threads"] = group.gloo_threads
        if isinstance(self._reducer.exchange, ChosenExchange | FutureHookExchange | GeneratorHookExchange):
            data["comm_hook"] = self._reducer.exchange.name
        return data

    def _of_the_module(self) -> dict[str, Any]:
        trained = [local_of(each) for each in self._wrapped.params.parameters if each.requires_grad]
        return {
            "module_name": type(self._wrapped.module).__name__,
            "dtypes": ", ".join(sorted({_TYPES.get(str(each.dtype), str(each.dtype)) for each in trained})),
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(each.numel() * each.element_size() for each in trained),
            "is_multi_device_module": int(len({each.device for each in trained}) > 1),
            "has_sync_bn": int(
                any(isinstance(layer, nn.SyncBatchNorm) for layer in self._wrapped.module.modules())
            ),
        }

    def _last_error(self) -> dict[str, Any]:
        strict = self._reducer.strict
        error = self._reducer.last_error or (strict.error if strict is not None else None)
        return {} if error is None else {"has_error": 1, "error": error}

    def _sample(self) -> dict[str, Any]:
        recorder = self._reducer.recorder
        durations = recorder.durations()
        self._samples += 1
        for key in _AVERAGED:
            self._sums[key] += durations[key]
        return {
            "iteration": self._iteration,
            **durations,
            **{f"avg_{key}": total // self._samples for key, total in self._sums.items()},
            **recorder.stamps(),
            **self._of_the_step(),
        }

    def _of_the_step(self) -> dict[str, Any]:
        reducer, context = self._reducer, self._reducer.context
        # torch numbers trainable parameters only.
        number = {slot: index for index, slot in enumerate(context.parameters.trainable)}
        order = (str(number[slot]) for slot in context.readiness.order if slot in number)
        unused = context.readiness.unused(reducer.planner.order)
        data: dict[str, Any] = {
            "num_buckets_reduced": reducer.launched,
            "has_rebuilt_buckets": int(reducer.uses_rebuilt_plan),
            "prev_iteration_grad_ready_order_indices": ", ".join(order),
            "unused_parameter_size": sum(context.parameters.slots[slot].nbytes for slot in unused),
        }
        if reducer.uses_rebuilt_plan:
            buckets = (
                " ".join(str(number[slot]) for slot in members if slot in number)
                for members in context.bucket_set.plan.buckets
            )
            sizes = [sum(slot.nbytes for slot in bucket.slots) for bucket in context.bucket_set.buckets]
            data["rebuilt_bucket_sizes"] = ", ".join(str(size) for size in sizes if size)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(buckets)
        return data


def log_environment(what: str) -> None:
    """Log the environment variables that affect process groups and devices, at debug level."""
    if _LOG.isEnabledFor(logging.DEBUG):
        relevant = {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        }
        shown = " ".join(f"{name}={value}" for name, value in relevant.items())
        _LOG.debug("%s; environment: %s", what, shown or "no relevant variable is set")
