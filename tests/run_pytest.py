"""What a Bazel test runs: pytest on the files that are named, which lie below the working directory."""

import os
import sys

import pytest

if __name__ == "__main__":
    # Python puts this file's folder first; nothing may be imported from there by a bare name.
    del sys.path[0]
    report = os.environ.get("XML_OUTPUT_FILE")
    options = ["-p", "no:cacheprovider", *([f"--junitxml={report}"] if report else [])]
    sys.exit(pytest.main([*options, *sys.argv[1:]]))
