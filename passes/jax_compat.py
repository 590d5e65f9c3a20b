"""The only module that uses private parts of JAX: `jax._src` and `jaxlib._*`.

It is written for jax >= 0.11.2 and < 0.13. Its functions do as little as possible. Other modules build on them.
"""

from __future__ import annotations

import atexit
import copy
import functools
import inspect
import os
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api, clusters, config, distributed, pjit, xla_bridge
from jax._src.interpreters import pxla
from jax._src.lax import lax as _lax
from jax.extend.mlir import refine_polymorphic_shapes
from jax.interpreters import mlir
from jaxlib import _hlo, _jax, xla_client  # pyright: ignore[reportAttributeAccessIssue]

from dhelix.errors import DhelixError

_UNREADABLE = re.compile(r"( all-reduce-start\(.*?), output_to_operand_aliasing=\{\{.*?\)\}")
TEXT_PARSER = """
import resource, struct, sys
limit = int(sys.argv[1])
from jaxlib import _hlo
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
read, write = sys.stdin.buffer, sys.stdout.buffer
while header := read.read(9):
    is_proto, length = struct.unpack("<BQ", header)
    source = read.read(length)
    try:
        text = _hlo.HloModule.from_serialized_hlo_module_proto(source).to_string() if is_proto else source.decode()
        status, answer = 0, _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except MemoryError:
        raise
    except Exception as error:
        status, answer = 1, str(error).encode(errors="replace")
    write.write(struct.pack("<BQ", status, len(answer)) + answer)
    write.flush()
"""
"""A program that reads HLO texts and protos, one after the other. launch/inspect/reading/parser_process.py runs it."""


def parse_hlo_text(text: str) -> bytes:
    """Parses HLO text that the installed jaxlib's XLA printed, and returns a serialized HloModuleProto.

    Raises DhelixError with the start of XLA's message if the text does not parse.
    """
    try:
        return _hlo.hlo_module_from_text(readable(text)).as_serialized_hlo_module_proto()
    except Exception as error:  # XlaRuntimeError, whose module differs between jaxlib versions
        message = " ".join(str(error).split())
        raise DhelixError(f"not HLO text that this jaxlib reads: {message[:300]}") from None


def readable(text: str) -> str:
    """The HLO text without `output_to_operand_aliasing` of all-reduce-starts.

    XLA prints this attribute, but XLA's parser rejects it. The program means the same without it.
    """
    return _UNREADABLE.sub(r"\1", text)


def hlo_text(module: bytes) -> str:
    """Serialized HloModuleProto -> HLO text."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()


def stablehlo_module(lowered: jax.stages.Lowered) -> mlir.ir.Module:
    """The MLIR module that `lowered.compile()` compiles; not a copy."""
    return _computation(lowered)._hlo


def stablehlo_to_hlo(module: mlir.ir.Module) -> bytes:
    """StableHLO with Shardy operations -> serialized HloModuleProto with shardings as `xla.sdy.*` attributes."""
    bytecode = mlir.module_to_bytecode(module)
    return _jax.mlir.mlir_module_to_xla_computation(bytecode).as_serialized_hlo_module_proto()


def refined(lowered: jax.stages.Lowered) -> mlir.ir.Module:
    """The StableHLO module of `lowered` with all shapes static, refined as `lowered.compile()` does it.

    A module has dynamic shapes if the program calls a function that was exported with symbolic shapes.
    """
    state = _computation(lowered).compile_args.get("shape_poly_state")
    module = stablehlo_module(lowered)
    if state is None or not state.uses_dim_vars:
        return module
    refined = refine_polymorphic_shapes(
        mlir_module=mlir.module_to_bytecode(module),
        enable_shape_assertions=True,
        validate_static_shapes=True,
        enable_shardy=jax.config.jax_use_shardy_partitioner,
    )
    with module.context:
        return mlir.ir.Module.parse(refined)


def replace_stablehlo_module(
    lowered: jax.stages.Lowered, module: mlir.ir.Module, name: str | None
) -> jax.stages.Lowered:
    """A copy of `lowered` that compiles `module` instead. `lowered` does not change.

    JAX's logs call the copy `name`. If `name` is None, they keep the old name.
    """
    computation = copy.copy(_computation(lowered))
    computation._hlo = module
    computation._executable = None
    if name is not None:
        computation._name = name
    replaced = copy.copy(lowered)
    replaced._lowering = computation  # pyright: ignore[reportAttributeAccessIssue]
    return replaced


def compiled_text(module: mlir.ir.Module, devices: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Compiles StableHLO over `devices`, which need not exist, with XLA options by name, and returns the HLO text."""
    wanted = xla_client.CompileOptions()
    wanted.num_replicas, wanted.num_partitions = 1, len(devices)
    wanted.env_option_overrides = list(options.items())
    build = wanted.executable_build_options
    build.num_replicas, build.num_partitions, build.use_spmd_partitioning = 1, len(devices), True
    build.use_shardy_partitioner = True
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(devices)).reshape(1, -1))
    executable = devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), wanted)
    return executable.hlo_modules()[0].to_string()


def apart(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """A copy of `lowered` with its own module. JAX keeps an executable as long as its module, here as the copy."""
    module = stablehlo_module(lowered)
    with module.context:
        copied = mlir.ir.Module.parse(mlir.module_to_bytecode(module))
    return replace_stablehlo_module(lowered, copied, None)


def _computation(lowered: jax.stages.Lowered) -> Any:
    """JAX's `MeshComputation` behind a `Lowered`."""
    computation = getattr(lowered, "_lowering", None)
    if not hasattr(computation, "_hlo"):
        raise DhelixError(
            f"expected the result of jax.jit(f).lower(...), got {type(lowered).__name__}"
            f" (jax {jax.__version__}; dhelix supports jax >= 0.11.2 and < 0.13)"
        )
    return computation


type Changed = tuple[jax.stages.Lowered, jax.stages.Compiled]
"""A changed program, and its executable, of `lowered.compile()`."""


def catch_compilations(change: Callable[[jax.stages.Lowered], Changed | None]) -> Callable[[], None]:
    """Calls `change` with each program that JAX is about to compile, whichever library jitted it.

    All jitted functions become executables in `MeshComputation.compile`. If `change` returns None, the program compiles
    as without this function. Otherwise what it returns runs instead. Programs that are marked (`mark_known`), and those
    that are compiled with options of their own, are not offered. A program that is lowered twice, such as ahead of time
    and at the first call, or for shardings that are spelled otherwise, is offered once, because JAX compiles it once.

    Returns:
      A function that undoes this.

    Raises:
      DhelixError: this jax has no such place.
    """
    kind: Any = getattr(pxla, "MeshComputation", None)
    original: Any = getattr(kind, "compile", None)
    needed = {"compiler_options", "device_assignment"}
    if original is None or not needed <= inspect.signature(original).parameters.keys():
        raise DhelixError(
            f"jax {jax.__version__} compiles programs at another place than dhelix knows, so only decorated steps are "
            "interleaved; use jax >= 0.11.2 and < 0.13"
        )
    done: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def compile_(self: Any, *args: Any, **options: Any) -> Any:
        own = bool(args or options.get("compiler_options")) or options.get("device_assignment") is not None
        if own or self._executable is not None or getattr(self, _KNOWN, False):
            return original(self, *args, **options)
        before, settings = done.setdefault(self._hlo, []), (self._compiler_options_kvs, self._device_list)
        for given, changed in before:
            if _same(given, settings):
                return original(self, *args, **options) if changed is None else _again(original, changed, self)
        infos = tuple(jax.stages.ArgInfo(aval, False) for aval in self.compile_args.get("global_in_avals", ()))
        lowered = jax.stages.Lowered(self, (infos, {}), None)  # pyright: ignore[reportArgumentType]
        made: Any = change(lowered)
        before.append((settings, None if made is None else _computation(made[0])))
        if made is None:
            return original(self, *args, **options)
        self._executable = made[1]._executable
        return self._executable

    kind.compile = compile_

    def undo() -> None:
        if kind.compile is compile_:
            kind.compile = original

    return undo


def _again(original: Callable[..., Any], changed: Any, computation: Any) -> Any:
    """Compiles a changed program for another lowering of its module. JAX finds it in its cache, so this is quick.

    Such lowerings differ in how they spell shardings: P("x") and P("x", None). The results of a step are often spelled
    in another way than the first state, so the second call of a step comes here.
    """
    twin = copy.copy(changed)
    twin.compile_args, twin._executable = computation.compile_args, None
    computation._executable = original(twin)
    return computation._executable


def mark_known(lowered: jax.stages.Lowered) -> None:
    """Keeps a program, and all copies of it that are made later, away from `catch_compilations`."""
    setattr(_computation(lowered), _KNOWN, True)


def _same(given: Any, settings: Any) -> bool:
    """Whether two sets of compilation arguments are equal. What cannot be compared counts as different."""
    try:
        return bool(given == settings)
    except Exception:
        return False


_KNOWN = "_dhelix_known"


def program_name(lowered: jax.stages.Lowered) -> str:
    """The name of a program's module, such as `jit_train_step`."""
    return mlir.ir.StringAttr(stablehlo_module(lowered).operation.attributes["sym_name"]).value


def debug_text(lowered: jax.stages.Lowered) -> str:
    """The program as MLIR text, with the names of operations and arguments, and without large constants."""
    return str(stablehlo_module(lowered).operation.get_asm(enable_debug_info=True, large_elements_limit=8))


def kept_arguments(lowered: jax.stages.Lowered) -> list[int]:
    """The numbers of the arguments (leaves, in order) that the program has. JAX leaves unused ones out."""
    return sorted(_computation(lowered).compile_args["kept_var_idx"])


def trace_context() -> Hashable:
    """The part of JAX's configuration, context meshes included, that makes `jax.jit` trace again if it changes."""
    return config.trace_context()


def context_on_mesh(equation: Any, mesh: jax.sharding.AbstractMesh) -> Any:
    """The context in which a jaxpr equation was traced (`jex_core.JaxprEqn.ctx`), with another mesh."""
    with equation.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        return type(equation.ctx)()


def convert_element_type(value: Any, dtype: Any, weak_type: bool) -> Any:
    """`jax.lax.convert_element_type` that can also convert to a weak type."""
    return _lax._convert_element_type(value, dtype, weak_type=weak_type)


def is_jitted(function: object) -> bool:
    """Whether `function` is the result of `jax.jit`."""
    return hasattr(function, "_jit_info")


def static_arguments(jitted: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of the static arguments of a `jax.jit` function."""
    info = jitted._jit_info
    return frozenset(info.static_argnums), frozenset(info.static_argnames)


def with_compiler_options(jitted: Any, options: dict[str, Any]) -> Any:
    """A copy of a `jax.jit` function with additional `compiler_options`."""
    info = jitted._jit_info
    given = (*info.compiler_options_kvs, *options.items())
    return pjit._cpp_pjit(jitted._fun, info._replace(compiler_options_kvs=given))


def xla_options(jitted: Any) -> dict[str, Any]:
    """The XLA options (`compiler_options`) of a `jax.jit` function."""
    return dict(jitted._jit_info.compiler_options_kvs)


def jit_settings(jitted: Any) -> dict[str, Any]:
    """Donated and static arguments of a `jax.jit` function, and its options `keep_unused` and `inline`."""
    names = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames", "keep_unused", "inline")
    return {name: getattr(jitted._jit_info, name) for name in names}


def jit_shardings(jitted: Any) -> list[Any]:
    """In- and out-shardings of a `jax.jit` function, flattened. An unspecified one is a placeholder without devices."""
    info = jitted._jit_info
    return [*(info.in_shardings_leaves or ()), *(info.out_shardings_leaves or ())]


def coordination_client() -> Any | None:
    """The client of the job's key-value store; None without `jax.distributed.initialize()`. Starts no backend."""
    return distributed.global_state.client


def process_number() -> int:
    """Index of this process in its job, once `jax.distributed` is initialized. Starts no backend."""
    return distributed.global_state.process_id


def process_total() -> int:
    """Number of processes in the job, once `jax.distributed` is initialized. Starts no backend."""
    return distributed.global_state.num_processes


def detected_cluster() -> tuple[str, Sequence[Any]] | None:
    """The cluster that `jax.distributed` detects: its class, (coordinator, processes, own number, local devices)."""
    kind: Any = clusters.ClusterEnv
    found = next((c for c in kind._cluster_types if not c.opt_in_only_method and c.is_env_present()), None)
    given = (os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None)
    return found and (found.__name__, kind.auto_detect_unset_distributed_params(*given, 300))


def around_first_devices(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls `before` when JAX is about to look for devices for the first time, and `after` when it has found them."""
    lock, to_do = threading.RLock(), [after, before]

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def first(*args: Any, **named: Any) -> Any:
            with lock:  # other threads wait; calls by `before` and `after` themselves pass
                if len(to_do) == 2:
                    to_do.pop()()
                    xla_bridge.get_backend()
                    to_do.pop()()
            return original(*args, **named)

        return first

    for name in ("backends", "get_backend", "local_devices", "process_count"):  # the last three bear no nested calls
        for place in (place for place in (xla_bridge, jax) if hasattr(place, name)):
            setattr(place, name, around(getattr(place, name)))


def leave_job() -> None:
    """At its end, this process does not wait for the other processes of its job. It must end by `os._exit`."""
    atexit.unregister(api.clean_up)


def program_key(lowered: jax.stages.Lowered) -> int:
    """A number that is equal for two lowerings that share one cached program. Valid while one of the two is alive."""
    return id(_computation(lowered))


def devices(lowered: jax.stages.Lowered) -> list[Any]:
    """The devices that a program is lowered for, in the order of its partitions; empty if the program names none.

    The list may hold devices that this machine does not have, such as the devices of a compile-only topology.
    """
    arguments = _computation(lowered).compile_args
    names = ("in_shardings", "out_shardings", "intermediate_shardings")
    for sharding in (s for name in names for s in arguments.get(name) or ()):
        sharding = sharding[0] if isinstance(sharding, tuple) else sharding
        try:
            return list(sharding._device_assignment)
        except (AttributeError, ValueError):  # unspecified, or of an abstract mesh
            continue
    return []
