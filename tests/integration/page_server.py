"""Runs the pages' blocks. One process imports torch, pagegen and transformers once, and forks for each page and for
each `pagegen` and `python` of a shell block: a command then costs its work and not 3 s of imports.

`page_server.py SOCKET` serves; the commands `pagegen` and `python` that pages find on their PATH are `page_client.py`.
A request is JSON (kind, argv, cwd, environment) with the caller's three streams; the answer is the exit status.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import linecache
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LOADED = (
    "torch", "torch.distributed.tensor", "pagegen", "pagegen_autotune", "pagegen.cli.main", "pagegen.cli.options",
    "pagegen.db", "pagegen.selection", "pagegen.serving", "pagegen.targets.cpu", "pagegen_autotune.tuner",
    "pagegen.integrations.transformers", "transformers.models.llama.modeling_llama",
)  # fmt: skip


def serve(place: str) -> None:
    """Answers until it is killed. Nothing here may start a thread: a fork would lose it."""
    for name in LOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for here
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(16)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                answer(connection)
            connection.close()


def answer(connection: socket.socket) -> None:
    """Runs one request in a process of its own and tells how it ended. Never returns."""
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if not message:  # somebody looked whether anybody is here
        os._exit(0)
    request = json.loads(message)
    child = os.fork()
    if child == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 256)
        os._exit(status_of(request))
    _, status, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    print(f"{seconds:5.1f} s of CPU:", request["kind"], *request["argv"], file=sys.stderr, flush=True)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def status_of(request: dict[str, Any]) -> int:
    """The exit status of what was asked for."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    try:
        {"pagegen": command, "python": interpreter, "page": page}[request["kind"]](request["argv"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def command(arguments: list[str]) -> None:
    """`pagegen ...`, as the page has it but for the time that tuning may take."""
    from pagegen.cli.main import main

    budget = os.environ["PAGES_BUDGET"]
    after = [*["--"], *arguments]
    main([budget if before == "--budget" else own for before, own in zip(after, arguments, strict=False)], "pagegen")


def interpreter(arguments: list[str]) -> None:
    """`python FILE ...`, `python -c CODE` or `python -m MODULE ...`."""
    sys.path.insert(0, "" if arguments[0] in ("-c", "-m") else str(Path(arguments[0]).parent))
    if arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def page(arguments: list[str]) -> None:
    """`STEPS RESULTS`: runs the steps of a page in one namespace, and writes what each printed, up to the first that
    fails."""
    names: dict[str, Any] = {"__name__": "__main__"}
    results = []
    for step in json.loads(Path(arguments[0]).read_text(encoding="utf-8")):
        started = time.perf_counter()
        printed, error = run_python(step, names) if step["language"] == "python" else run_shell(step)
        results.append({"printed": printed, "error": error, "seconds": time.perf_counter() - started})
        if error:
            break
    Path(arguments[1]).write_text(json.dumps(results), encoding="utf-8")


def run_python(step: dict[str, Any], names: dict[str, Any]) -> tuple[str, str]:
    """What the code prints, and how it failed ("" where it did not)."""
    code = step["code"]
    linecache.cache[step["place"]] = (len(code), None, code.splitlines(keepends=True), step["place"])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(step["before"], "<before>", "exec"), names)
            exec(compile(code, step["place"], "exec"), names)
        except BaseException:
            return printed.getvalue(), traceback.format_exc()
    return printed.getvalue(), ""


def run_shell(step: dict[str, Any]) -> tuple[str, str]:
    """The same for a shell block, or for a change to apply."""
    run = {"sh": ["bash", "-euo", "pipefail", "-c", step["code"]], "diff": ["patch", "-p1", "--no-backup-if-mismatch"]}
    given = step["code"] if step["language"] == "diff" else ""
    done = subprocess.run(run[step["language"]], input=given, capture_output=True, text=True, check=False)
    said = re.sub(r"[^\n]*\r", "", done.stderr)  # progress bars
    return done.stdout, "" if done.returncode == 0 else f"exit status {done.returncode}\n{done.stdout}{said}"


if __name__ == "__main__":
    serve(sys.argv[1])
