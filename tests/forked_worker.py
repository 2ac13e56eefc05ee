"""Fork processes that run one worker script, which is imported once: to import torch takes seconds.

    python tests/forked_worker.py SCRIPT IN,OUT...

Each pair of file descriptors becomes standard input and output of a process that calls ``main()`` of SCRIPT.
Prints the number of each process that ends, and its exit code, or its signal as a negative number.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path


def main(script: str, *pairs: str) -> None:
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = worker
    spec.loader.exec_module(worker)
    if "torch" in sys.modules:
        import torch._dynamo  # noqa: F401  (an optimiser imports it on first use: seconds in each process)
    pipes = [tuple(map(int, pair.split(","))) for pair in pairs]
    numbers = {}
    for number, (given, answers) in enumerate(pipes):
        process = os.fork()
        if not process:
            code = 1
            try:
                os.dup2(given, 0)
                os.dup2(answers, 1)
                for pipe in pipes:  # what a process holds open its partner does not see end
                    for descriptor in pipe:
                        os.close(descriptor)
                worker.main()
                code = 0
            except BaseException:  # noqa: BLE001  nothing may go on in a copy of this process
                traceback.print_exc()
            os._exit(code)
        numbers[process] = number
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)
    while numbers:
        process, status = os.wait()
        print(numbers.pop(process), os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
