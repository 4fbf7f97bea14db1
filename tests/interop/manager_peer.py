#!/usr/bin/env python3
"""A service manager as systemd is one to its service: sockets that outlive it, a notify socket, a watchdog.

    manager_peer.py BINARY CONFIG NAME SOCKETS [KEY=VALUE ...]

It listens with SOCKETS sockets (SO_REUSEPORT, if more than one) on one port of 127.0.0.1 and passes them to each process that
it starts, all by the name NAME, with further variables in the environment. Standard input has one object a line, each answered
by {"done": ...} once it holds (SOCKETS is 0: it passes its standard input instead):
    start       starts the process; done once it has said READY=1, or has ended
    stop        sends SIGTERM; done with the exit code
    signal      sends a signal by its number
    hold        stops the thread of this name, and no other (ptrace); done with the error where that is forbidden
    release     lets that thread go on
    notes       what the process has said since it was started, and at which second of the monotonic clock
Standard output says {"ready": true, "port": ...} first. Nothing but the standard library is needed. It ends with its input,
and the process with it.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
ALL_THREADS = 0x40000000  # __WALL
PR_SET_PDEATHSIG = 1

binary, config, name, count = sys.argv[1:5]
variables = dict(pair.split("=", 1) for pair in sys.argv[5:])
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def say(line):
    print(json.dumps(line), flush=True)


def listening(port, shared):
    new = socket.socket()
    if shared:
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    new.bind(("127.0.0.1", port))
    new.listen(4096)
    return new


sockets = [listening(0, int(count) > 1)]
port = sockets[0].getsockname()[1]
sockets += [listening(port, True) for _ in range(int(count) - 1)]
# An abstract address, as containers have; what the address is made of is tested with a path.
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.bind(f"\0isthmus-test-{os.getpid()}" if "NOTIFY_PATH" not in variables else variables["NOTIFY_PATH"])
process, held = None, None
notes, changed = [], threading.Condition()


def listen():
    while True:
        said = notify.recv(65536).decode()
        with changed:
            notes.append({"at": time.monotonic(), "said": said.split("\n")})
            changed.notify_all()


def start():
    global process
    with changed:
        notes.clear()
    process = os.fork()
    if process == 0:
        # A peer that is killed leaves nothing behind.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # First out of the way of the numbers that they are to have.
        passed = sockets[: int(count)] or [sys.stdin]
        away = [os.dup2(one.fileno(), 100 + at) for at, one in enumerate(passed)]
        for at, one in enumerate(away):
            os.dup2(one, 3 + at, inheritable=True)
            os.close(one)
        address = notify.getsockname()
        address = "@" + address[1:].decode() if isinstance(address, bytes) else address
        ours = {
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(passed)),
            "LISTEN_FDNAMES": ":".join([name] * len(passed)),
            "NOTIFY_SOCKET": address,
            "WATCHDOG_PID": str(os.getpid()),
        }
        environment = {**os.environ, **ours, **variables}
        os.execve(binary, [binary, "run", "-c", config], environment)
    ended = None
    while ended is None:
        with changed:
            if any("READY=1" in note["said"] for note in notes):
                return process
            changed.wait(0.02)
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            ended = os.waitstatus_to_exitcode(status)
    process = None
    return {"ended": ended}


def stop():
    global process
    os.kill(process, signal.SIGTERM)
    _, status = os.waitpid(process, 0)
    process = None
    return os.waitstatus_to_exitcode(status)


def trace(request, thread):
    if libc.ptrace(request, thread, None, None) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x}")


def hold(wanted):
    global held
    for thread in os.listdir(f"/proc/{process}/task"):
        with open(f"/proc/{process}/task/{thread}/comm", encoding="utf-8") as file:
            if file.read().strip() == wanted:
                held = int(thread)
    try:
        trace(PTRACE_SEIZE, held)
    except PermissionError as error:
        return str(error)
    trace(PTRACE_INTERRUPT, held)
    os.waitpid(held, ALL_THREADS)
    return True


def obey(order):
    if "start" in order:
        return start()
    if "stop" in order:
        return stop()
    if "signal" in order:
        os.kill(process, order["signal"])
        return True
    if "hold" in order:
        return hold(order["hold"])
    if "release" in order:
        trace(PTRACE_DETACH, held)
        return True
    with changed:
        return list(notes)


threading.Thread(target=listen, daemon=True).start()
say({"ready": True, "port": port})
try:
    for line in sys.stdin:
        say({"done": obey(json.loads(line))})
finally:
    if process:
        os.kill(process, signal.SIGKILL)
