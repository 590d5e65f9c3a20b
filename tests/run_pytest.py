"""What a Bazel test runs: pytest on files named below the working directory, less the tests for real GPUs."""

import os
import sys

import pytest

if __name__ == "__main__":
    # Python puts this file's folder first; nothing may be imported from there by a bare name.
    del sys.path[0]
    report = os.environ.get("XML_OUTPUT_FILE")
    options = ["-p", "no:cacheprovider", "-m", "not gpu", *([f"--junitxml={report}"] if report else [])]
    status = pytest.main([*options, *sys.argv[1:]])
    # A file may hold nothing but tests for GPUs.
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
