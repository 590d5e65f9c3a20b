"""A Python toolchain made of the checkout's own virtual environment.

The packages that dhelix needs are pinned once, in requirements/, and installed once, by `make venv`; Bazel builds and
tests with that environment. An environment elsewhere is named by the variable DHELIX_VENV.
"""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_runtime(
    name = "python",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":python",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _venv_python_impl(ctx):
    checkout = ctx.path(Label("//:WORKSPACE")).dirname
    venv = ctx.os.environ.get("DHELIX_VENV", "%s/.venv" % checkout)
    interpreter = venv + "/bin/python"
    if not ctx.path(interpreter).exists:
        fail("no Python at %s: run `make venv` first" % interpreter)
    ctx.file("BUILD", _BUILD.format(interpreter = interpreter))

venv_python = repository_rule(
    implementation = _venv_python_impl,
    environ = ["DHELIX_VENV"],
    local = True,
)
