"""A GPU in name: tensors that say they are on ``cuda:0`` and are computed on the CPU, with streams, events and graphs.
What a GPU forbids is an error here, and so is what goes wrong on one now and then.

Rules:
1. A tensor of the host in an operation of the device is an error (see ``far``).
2. Inside of a capture nothing may be waited for, and nothing be copied from the host.
3. What one stream wrote another may read only when it has waited for it.
4. A replay is the recorded operations on the recorded memory, in the order of then. Python is not asked again, and what
   a graph allocated holds nothing of use before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.far import FAR, Crossings, Far, aten

GPU = torch.device("cuda", 0)


class OnGpu(Far):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


class Stream:
    """``seen``: of each stream, how many of its operations came before what this one does next."""

    def __init__(self, device: Any = None) -> None:
        self.done = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        for stream, count in (*other.seen.items(), (other, other.done)):
            self.seen[stream] = max(count, self.seen.get(stream, 0))

    def synchronize(self) -> None:
        pass


class Event:
    def record(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


@dataclass(slots=True)
class Graph:
    """What was recorded: a function, its arguments, and what it gave."""

    calls: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = field(default_factory=list)
    gpu: Gpu | None = None

    def replay(self) -> None:
        assert self.gpu is not None and self.gpu.recording is None
        self._spoil()
        for function, args, kwargs, given in self.calls:
            with torch.inference_mode(False), torch.no_grad():
                again = tree_flatten(function(*tree_map(near, args), **tree_map(near, kwargs)))[0]
                for old, new in zip(given, again, strict=bool(given)):
                    old.near.copy_(new)
            self.gpu.ordered(args, kwargs, given)
        self._spoil()

    def _spoil(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for *_, given in self.calls:
                for old in given:
                    old.near.fill_(torch.nan if old.near.is_floating_point() else 1)


class Gpu(Crossings):
    """``graphs``: all that were captured."""

    def __init__(self) -> None:
        super().__init__(OnGpu)
        self.stream = Stream()
        self.recording: Graph | None = None
        self.graphs: list[Graph] = []
        self._writers: dict[int, tuple[Stream, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waited = self.waits.total()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [x for x in tree_flatten(result)[0] if isinstance(x, Far)]
        read = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Far)]
        if func.overloadpacket is aten.to or not (made or read):
            return result
        if self.recording is not None:
            assert self.waits.total() == waited, f"{func}: waits inside of a capture"
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
            assert all(isinstance(x, Far) for x in tensors), f"{func}: reads host memory inside of a capture"
        old = {place(x) for x in read}  # a view, or what was written in place
        self._took(func, args, kwargs or {}, [x for x in made if place(x) not in old])
        return result

    def launch(self, kernel: Callable[..., None], *args: Any) -> None:
        """A kernel of one's own: a function of tensors on the CPU that writes to some of them."""
        def run(*given: Any) -> list[Any]:
            kernel(*given)
            return []

        with torch.inference_mode(False), torch.no_grad():
            run(*tree_map(near, args))
        self._took(run, args, {}, [])

    def ordered(self, args: Any, kwargs: Any, fresh: list[Any]) -> None:
        """Rule 3, of an operation on the current stream."""
        self.stream.done += 1
        new = {place(x) for x in fresh}
        for x in tree_flatten((args, kwargs))[0]:
            if isinstance(x, Far) and place(x) not in new:
                stream, count = self._writers.get(place(x), (self.stream, 0))
                assert stream is self.stream or count <= self.stream.seen.get(stream, 0), "read before it is written"
                new.add(place(x))
        self._writers |= dict.fromkeys(new, (self.stream, self.stream.done))

    def _took(self, function: Callable[..., Any], args: Any, kwargs: Any, fresh: list[Any]) -> None:
        self.ordered(args, kwargs, fresh)
        if self.recording is not None:
            if "device" in kwargs:
                kwargs = kwargs | {"device": torch.device("cpu")}
            self.recording.calls.append((function, args, kwargs, fresh))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def capture(self, graph: Graph, pool: Any = None, stream: Stream | None = None,
                capture_error_mode: str = "global") -> Iterator[None]:
        assert stream is not None and capture_error_mode == "thread_local", "services have threads"
        with self.on(stream):
            self.recording, graph.gpu = graph, self
            try:
                yield
            finally:
                self.recording = None
        self.graphs.append(graph)


class Named(TorchFunctionMode):
    """``cuda`` in what torch is asked for."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **kwargs or {})
        args, kwargs = tree_map(self._far, args), {name: self._far(x) for name, x in (kwargs or {}).items()}
        if func is torch.tensor and kwargs.get("device") == FAR:
            self._gpu.waits["to the device"] += 1
            assert self._gpu.recording is None, "torch.tensor inside of a capture"
            return OnGpu(torch.tensor(*args, **kwargs | {"device": "cpu"}))
        if func is torch.Tensor.tolist and isinstance(args[0], Far):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)

    @staticmethod
    def _far(x: Any) -> Any:
        is_device = isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda"))
        return FAR if is_device and torch.device(x).type == "cuda" else x


def near(x: Any) -> Any:
    return x.near if isinstance(x, Far) else x


def place(x: Far) -> int:
    return x.near.untyped_storage().data_ptr()


@contextmanager
def pretended() -> Iterator[Gpu]:
    gpu = Gpu()
    cuda = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": gpu.capture, "stream": gpu.on,
            "current_stream": lambda device=None: gpu.stream, "graph_pool_handle": object,
            "synchronize": lambda device=None: None, "current_device": lambda: 0, "device_count": lambda: 1,
            "get_device_capability": lambda device=None: (9, 0), "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (60 * 10**9, 80 * 10**9)}
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in cuda.items():
            patch.setattr(torch.cuda, name, stand_in)
        with Named(gpu), gpu:
            yield gpu
