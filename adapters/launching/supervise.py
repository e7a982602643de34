"""The process between Goodgate and an engine. It makes sure that nothing of the engine outlives us.

    python -I -S supervise.py GRACE_S PARENT_PID LOG_LIMIT ENV_JSON COMMAND [ARGUMENT...]

It starts the command and ends with the command's own exit status. It stops the command, and everything the command has
started, when its standard input closes, when the parent process is gone (however it died), or on TERM, INT and HUP:
first TERM to the process group, then KILL to whatever is left after the grace. If its standard output is a file that
outgrows LOG_LIMIT bytes, it cuts the file down to its end. Standard library only, run by path: it starts in about
20 ms, and neither the working folder nor PYTHONPATH can change what it does.

Why a process of its own: PR_SET_PDEATHSIG reaches only direct children and is bound to the thread that started them.
Engines start workers, and servers start engines from threads. Here the lifeline is a pipe and a pidfd, which belong to
no thread, and as a sub-reaper this process inherits every worker whose own parent died, also one that has left the
process group. PR_SET_PDEATHSIG is what remains for the case that somebody kills this process itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIFELINE = 0  # standard input: a pipe whose other end only the parent holds
LOG = 1
LOG_CHECK_MS = 1000
LOG_KEPT_BYTES = 1 << 20  # of a log that is cut
COMMAND_NOT_STARTED = 127  # as a shell reports it

HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

IS_LINUX = sys.platform == "linux"


def main(arguments: list[str]) -> NoReturn:
    grace_s, parent, log_limit = float(arguments[0]), int(arguments[1]), int(arguments[2])
    env, command = json.loads(arguments[3]), arguments[4:]
    signals = _signal_pipe()
    if IS_LINUX:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    engine = _start(command, env)
    status = _watch(engine, parent, signals, log_limit)
    if status is None:
        os.killpg(0, signal.SIGTERM)
        status = _await_end(engine, time.monotonic() + grace_s)
    _kill_rest()
    _end_like(status if status is not None else signal.SIGKILL)


def _start(command: list[str], env: dict[str, str]) -> int:
    """Fork and run the command; a plain fork is safe here, because this process has one thread.

    Signals wait until the child has put off our handlers: one that comes before would be lost on the engine, and a stop
    would last for the whole grace.
    """
    supervisor = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        return child
    try:
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if IS_LINUX:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(COMMAND_NOT_STARTED)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is ignored stays so across exec
        os.dup2(os.open(os.devnull, os.O_RDONLY), LIFELINE)
        os.execvpe(command[0], command, {**os.environ, **env})
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(COMMAND_NOT_STARTED)


def _watch(engine: int, parent: int, signals: int, log_limit: int) -> int | None:
    """Wait for the engine's end (its wait status) or for a reason to stop it (None)."""
    poller = select.poll()
    poller.register(LIFELINE, select.POLLIN)
    poller.register(signals, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # no pidfd on this system: the pipe alone has to do
        poller.register(os.pidfd_open(parent), select.POLLIN)
    if os.getppid() != parent:
        return None
    while True:
        ready = {fd for fd, _ in poller.poll(LOG_CHECK_MS)}
        _cut_log(log_limit)
        asked_to_stop = signals in ready and any(number != signal.SIGCHLD for number in os.read(signals, 64))
        status = _reap(engine)
        if status is not None:
            return status
        if asked_to_stop or ready - {signals}:
            return None


def _cut_log(limit: int) -> None:
    """Keep the end of a log that has outgrown its limit. The few lines that are written meanwhile may be lost."""
    log = os.fstat(LOG)
    if not stat.S_ISREG(log.st_mode) or log.st_size <= limit:
        return
    with contextlib.suppress(OSError):  # a log that cannot be cut, on a full disk say, must not end the engine
        end = os.pread(LOG, min(LOG_KEPT_BYTES, limit // 2), log.st_size - min(LOG_KEPT_BYTES, limit // 2))
        os.ftruncate(LOG, 0)
        os.write(LOG, b"[This log had outgrown %d bytes and was cut; its end follows.]\n" % limit + end)


def _await_end(engine: int, deadline: float) -> int | None:
    """Wait until no process is left or the deadline has passed; the engine's wait status if it has ended."""
    status = None
    while time.monotonic() < deadline:
        ended = _reap(engine)
        status = ended if ended is not None else status
        if not _has_children():
            break
        time.sleep(0.02)
    return status


def _kill_rest() -> None:
    """KILL every process below this one. Whoever loses its parent becomes our child: repeating ends it."""
    while _has_children():
        if not IS_LINUX:
            os.killpg(0, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        _reap(-1)


def descendants(root: int) -> list[int]:
    """Every process below this one, as far as the system tells (Linux does). The root itself is not among them."""
    if not IS_LINUX:
        return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # "pid (name) state ppid ...", and the name may itself hold spaces and parentheses
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for pid in level for child in children.get(pid, [])]
        found += level
    return found


def _reap(engine: int) -> int | None:
    """Collect every child that has ended; the wait status of the engine if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == engine:
                status = ended[1]
    return status


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_like(status: int) -> NoReturn:
    """End as the engine did, so that whoever waits for us reads its exit code or signal."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of ours could take the place of the engine's
    with contextlib.suppress(OSError, ValueError):  # no handler can be set for KILL, nor for those that libc keeps
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # still here: as a shell tells it


def _signal_pipe() -> int:
    """The numbers of arriving signals as bytes on a pipe, so that one poll waits for everything."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender)
    for number in HANDLED:
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: the engine must not inherit deafness
    return receiver


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


if __name__ == "__main__":
    main(sys.argv[1:])
