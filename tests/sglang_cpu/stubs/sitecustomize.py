"""Lets SGLang 0.5.23 start on a machine without a GPU. SGLang itself is not touched.

Comes first on PYTHONPATH. PyPI's torchvision is built for CUDA's torch and lacks two operators with any other, whose
names alone SGLang needs. Its kernels, `sgl_kernel`, have no build for CPUs: here they are functions that raise when
they are called, which none is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LIBRARIES: list[Any] = []


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators just before torchvision is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


class _Kernels(MetaPathFinder, Loader):
    """Finds `sgl_kernel` and all below it but the one module without which SGLang can do."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "sgl_kernel" or name == "sgl_kernel.scalar_type":
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def missing(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)

            def call(*args: Any, **named: Any) -> None:
                raise NotImplementedError(f"{module.__name__}.{attribute} needs a GPU")

            return call

        module.__getattr__ = missing


sys.meta_path[:0] = [_BeforeTorchvision()]
sys.meta_path.append(_Kernels())
