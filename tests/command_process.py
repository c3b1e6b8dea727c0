"""One process of a command that several run together; `processes_test` starts it.

python command_process.py MODULE ARGUMENTS…
"""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.fspath(os.getcwd()))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
