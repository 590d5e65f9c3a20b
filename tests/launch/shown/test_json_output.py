"""With `--json`, stdout is JSON alone."""

import subprocess
import sys

PROGRAM = """
import ctypes, os
from dhelix.launch.shown import json_output
with json_output.alone(True) as write:
    print("of Python")
    os.system("echo of another program")
    ctypes.CDLL(None).puts(b"of a library")
    write("{}")
print("afterwards")
"""


def test_what_others_print_goes_to_stderr() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout == "{}\nafterwards\n"
    assert sorted(ran.stderr.splitlines()) == ["of Python", "of a library", "of another program"]
