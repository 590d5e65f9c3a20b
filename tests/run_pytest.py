"""The program of a Bazel test. It runs pytest on the named files, without the tests that need GPUs."""

import os
import sys

import pytest

if __name__ == "__main__":
    # Python puts this file's folder first on its path. Modules there must not be imported by a bare name.
    del sys.path[0]
    report = os.environ.get("XML_OUTPUT_FILE")
    options = ["-p", "no:cacheprovider", "-m", "not gpu", *([f"--junitxml={report}"] if report else [])]
    status = pytest.main([*options, *sys.argv[1:]])
    # A file may contain only tests that need GPUs.
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
