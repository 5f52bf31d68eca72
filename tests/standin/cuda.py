"""Load the stand-in and have `torch.cuda` use it, in a process that has not imported torch yet."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

# In the order in which they link to each other.
_TORCH = ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python")


def load(library: Path) -> ModuleType:
    """Make "cuda" a device of this process; return the module that reads and sets its allocator."""
    assert "torch" not in sys.modules, "torch has asked for CUDA's hooks already"
    spec = importlib.util.find_spec("torch")
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    for name in _TORCH:
        ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["KINETO_LOG_LEVEL"] = "6"

    import torch

    spec = importlib.util.spec_from_file_location(library.stem, library)
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    torch.set_num_threads(1)
    import torch._dynamo
    import torch._inductor.utils  # both look for a real device while there is none

    _replace_bindings(torch._C, device)
    _replace_python(torch.cuda, device)
    importlib.import_module("standin.fused_kernels").device = device  # its ops need the devices
    _register_collectives(device)
    return device


def _replace_bindings(bindings: Any, device: ModuleType) -> None:
    """Replace the functions of torch._C that only a build with CUDA has."""

    def exchange_device(index: int) -> int:
        before: int = device.current_device()
        if index >= 0:
            device.set_device(index)
        return before

    def set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
        device.set_stream(stream_id, device_index)

    def memory_snapshot(_pool_and_traces: Any) -> dict[str, Any]:
        return {
            "segments": [
                {
                    "device": index,
                    "segment_pool_id": (0, pool),
                    "total_size": total,
                    "allocated_size": allocated,
                }
                for (index, pool, _), (total, allocated) in device.segments().items()
            ]
        }

    stand_ins = {
        "_cuda_getDeviceCount": device.device_count,
        "_cuda_getDevice": device.current_device,
        "_cuda_setDevice": device.set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": lambda index: exchange_device(index),  # Dynamo wants two functions
        "_cuda_getCurrentRawStream": device.current_stream,
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: device.synchronize(device.current_device()),
        "_cuda_memoryStats": device.stats,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memorySnapshot": memory_snapshot,
        "_cuda_resetPeakMemoryStats": device.reset_peak,
        "_cuda_emptyCache": device.empty_cache,
        "_cuda_clearCublasWorkspaces": device.clear_workspaces,
        "_cuda_isCurrentStreamCapturing": device.is_capturing,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_init": lambda: None,
        "_has_cuda": True,
        "has_cuda": True,
    }
    for name, stand_in in stand_ins.items():
        setattr(bindings, name, stand_in)


def _replace_python(cuda: Any, device: ModuleType) -> None:
    """Replace torch.cuda's information on devices, and its streams, which need a class of CUDA."""
    import torch

    def index_of(which: Any) -> int:
        if which is None:
            return int(device.current_device())
        index = which if isinstance(which, int) else torch.device(which).index
        return int(device.current_device()) if index is None else index

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **named: int) -> Stream:
            if named:
                return super().__new__(cls, **named)
            return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: bool) -> Event:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

    def stream(number: int, index: int) -> Stream:
        return Stream(stream_id=number, device_index=index, device_type=1)

    class CUDAGraph:
        """Take the place of the class that only a build with CUDA has."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._number, self._pool = 0, 0

        def capture_begin(
            self,
            pool: tuple[int, int] | None = None,
            capture_error_mode: str = "global",
            check_input_liveness: bool = False,
        ) -> None:
            self._pool = device.new_pool() if pool is None else pool[1]
            device.begin_capture(self._pool)

        def capture_end(self) -> None:
            self._number = device.end_capture()

        def replay(self) -> None:
            device.replay_graph(self._number)

        def reset(self) -> None:
            device.drop_graph(self._number)

        def pool(self) -> tuple[int, int]:
            return 0, self._pool

        __del__ = reset

    class Properties:
        name, major, minor, total_memory, multi_processor_count = "Stand-in GPU", 9, 0, 80 << 30, 132
        L2_cache_size = 1 << 20

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        unseen = torch._C._DisableTorchDispatch()
        copied = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone()
        del unseen
        return copied.untyped_storage()

    def mem_get_info(which: Any = None) -> tuple[int, int]:
        total = min(device.limit(index_of(which)), Properties.total_memory)
        return total - cuda.memory_reserved(which), total

    fractions: dict[int, float] = {}

    def set_memory_fraction(fraction: float, index: int) -> None:
        fractions[index] = fraction
        device.set_allowed(index, round(fraction * mem_get_info(index)[1]))

    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, nbytes)
        unseen = torch._C._DisableTorchDispatch()
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), nbytes)
        del unseen
        return storage

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, _flags: int) -> int:
            device.register_host(address, nbytes)
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            device.register_host(address, 0)
            return 0

    cuda.cudart = lambda: Runtime
    cuda._initialized = True
    cuda._exchange_device = torch._C._cuda_exchangeDevice
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    torch.UntypedStorage.clone = clone  # torch's clones and resizes storages of CUDA in a build for CUDA only
    torch.UntypedStorage.resize_ = resize_
    cuda._lazy_init = lambda: None
    cuda.is_current_stream_capturing = device.is_capturing
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = lambda: (0, device.new_pool())
    torch._C._host_emptyCache = lambda: None  # type: ignore[attr-defined]
    cuda.is_initialized = cuda.memory.is_initialized = lambda: True
    cuda.device_count = device.device_count
    torch._C._cuda_setMemoryFraction = set_memory_fraction  # type: ignore[attr-defined]
    torch._C._cuda_getMemoryFraction = lambda index: fractions.get(index, 1.0)  # type: ignore[attr-defined]
    cuda.mem_get_info = cuda.memory.mem_get_info = mem_get_info
    cuda.get_device_name = lambda which=None: Properties.name
    cuda.get_device_capability = lambda which=None: (Properties.major, Properties.minor)
    cuda.get_device_properties = lambda which=None: Properties
    cuda.default_generators = tuple(map(device.default_generator, range(device.device_count())))
    cuda.current_stream = lambda which=None: stream(device.current_stream(index_of(which)), index_of(which))
    cuda.default_stream = lambda which=None: stream(0, index_of(which))
    cuda.synchronize = lambda which=None: device.synchronize(index_of(which))
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event


def _register_collectives(device: ModuleType) -> None:
    """Make "standin" a backend of torch.distributed, in the place of NCCL."""
    from torch import distributed

    def group(store: distributed.Store, rank: int, size: int, timeout: timedelta) -> distributed.Backend:
        return device.host_memory_group(distributed.ProcessGroupGloo(store, rank, size, timeout))

    distributed.Backend.register_backend("standin", group, devices="cuda")
