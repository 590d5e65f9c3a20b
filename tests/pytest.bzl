"""Pytest files as Bazel tests."""

# Dependencies of the tests in //tests/passes/...
PASSES = [
    "//benchmarks",
    "//models",
    "//passes",
    "//runtime",
    "//tests/passes:helpers",
]

def pytest_tests(deps, smoke = False, data = [], exclude = [], size = "large"):
    """Makes a py_test for each test_*.py of the folder. Its other Python files become the library `helpers`.

    Args:
      deps: the tests' dependencies.
      smoke: whether to tag the tests `smoke`. CI runs these tests under Bazel.
      data: further files that the tests read.
      exclude: test files that cannot run from Bazel's tree.
      size: Bazel's test size, which sets the time limit.
    """
    native.py_library(
        name = "helpers",
        testonly = True,
        srcs = native.glob(["*.py"], exclude = ["test_*.py"]),
        data = native.glob(["testdata/**"]),
    )
    helpers = [":helpers"] + (["//tests:helpers"] if native.package_name() != "tests" else [])
    for test in native.glob(["test_*.py"], exclude = exclude):
        native.py_test(
            name = test[:-len(".py")],
            size = size,
            srcs = [test, "//tests:run_pytest.py"],
            main = "//tests:run_pytest.py",
            args = ["%s/%s" % (native.package_name(), test)],
            data = ["//:pyproject.toml"] + data,
            tags = ["smoke"] if smoke else [],
            deps = deps + helpers,
        )
