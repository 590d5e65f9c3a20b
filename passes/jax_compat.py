"""The one module that touches `jax._src` and `jaxlib._*`; jax >=0.11.2,<0.13."""

from __future__ import annotations

from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

from dhelix.passes.errors import DhelixError


def parse_hlo_text(text: str) -> bytes:
    """HLO text as XLA prints it -> serialized HloModuleProto. Raises DhelixError with XLA's message."""
    try:
        return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except Exception as error:  # XlaRuntimeError, whose module differs between jaxlib versions
        raise DhelixError(f"not HLO text that this jaxlib reads: {str(error).splitlines()[0]}") from None


def hlo_text(module: bytes) -> str:
    """Serialized HloModuleProto -> HLO text."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()
