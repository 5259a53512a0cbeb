"""Start fresh Python interpreters as child processes, supervise them, and end them with everything they started.

Children are not forked from this process, which may hold torch, and do not import the user's script again. Parent and
child exchange messages over the child's stdin and stdout: a length, then the payload.

A supervised child starts with `fork_under_supervisor`: the process that the parent started becomes the supervisor, and
its fork does the work. When either the worker or the parent ends, the supervisor kills everything the worker started.
In a PID namespace a second supervisor is the first process of the namespace: the kernel kills all other processes of
the namespace when that one ends. Without a namespace, descendants are adopted, searched for and killed. The worker's
stderr is copied to ours through a pipe, so that the worker can only write to it.

`RemoteWorker` calls methods of an object in a child process that runs `serve`. Its messages are pickled, as those of
`send` and `receive`, so both ends must be trusted: unpickling executes code. Sandboxed workers, which may run code that
a model wrote, answer in JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from assay.system import isolation

if TYPE_CHECKING:
    import asyncio

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ask the parent to stop; children leave that to it
KILL_REQUEST = signal.SIGUSR2  # asks a supervisor to kill its worker and everything the worker started
KILL_LIMIT_S = 5.0
MAX_PROCESSES = 1024  # per namespace, where the kernel supports such a limit

_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_COPY_BYTES = 4096  # a pipe that is ready for writing accepts this many bytes without blocking


class ChildProcess:
    """A fresh interpreter that runs `main()` of a module, connected by its stdin and stdout.

    It gets the `sys.path` of this process, and `arguments` as `sys.argv[2:]`. STOP_SIGNALS are blocked in the child
    until it calls `ignore_stop_signals`. A `supervised` child must call `fork_under_supervisor` first.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        supervised: bool = False,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._supervised = supervised
        self._reaping = threading.Lock()  # once the process is reaped, its id may belong to another process
        path = json.dumps([str(folder) or os.getcwd() for folder in sys.path])
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP.format(module), path, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment,
                pass_fds=tuple(pass_fds),
                start_new_session=supervised,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, message: Any, deadline: float | None = None) -> None:
        send(self.input, message, deadline)

    def receive(self) -> Any:
        """Return the next message of a trusted child (it is unpickled)."""
        return receive(self.output)

    def stop(self) -> None:
        """Kill the child, and if it is supervised everything it started, without waiting. Thread-safe."""
        with self._reaping:
            if self.process.returncode is None:
                self.process.send_signal(KILL_REQUEST if self._supervised else signal.SIGKILL)

    def close(self) -> str:
        """Kill the child as `stop` does, wait for it, close the pipes, and return how it ended."""
        with self._reaping:
            if self._supervised:
                self._end_supervised()
            else:
                self.process.kill()
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return exit_reason(self.process.returncode)

    def _end_supervised(self) -> None:
        try:
            self.process.wait(timeout=0.05)  # if it ended by itself, keep its own exit code
        except subprocess.TimeoutExpired:
            self.process.send_signal(KILL_REQUEST)
            try:
                self.process.wait(timeout=KILL_LIMIT_S + 1)
            except subprocess.TimeoutExpired:  # without a PID namespace, the worker can stop its supervisor
                _kill([*_descendants(self.process.pid), self.process.pid])
                self.process.wait()


def exit_reason(code: int) -> str:
    """Describe an exit code. A code above 128 is a shell's notation for: killed by a signal."""
    signum = -code if code < 0 else code - 128
    with suppress(ValueError):
        if signum > 0:
            return f"killed by {signal.Signals(signum).name}"
    return f"exit code {code}"


def take_pipes() -> tuple[int, int]:
    """In the child: return descriptors of the pipes from and to the parent, and redirect stdout to stderr.

    What users' functions print goes to stderr. Programs that they start do not inherit the descriptors.
    """
    incoming, outgoing = os.dup(_STDIN), os.dup(_STDOUT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.dup2(_STDERR, _STDOUT)
    sys.stdout = sys.stderr
    return incoming, outgoing


def ignore_stop_signals() -> None:
    """In the child: ignore STOP_SIGNALS, because the parent decides when its children end.

    Processes that the child starts receive them as usual: programs do not inherit a handler (they do inherit SIG_IGN),
    and forks restore the default.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.register_at_fork(after_in_child=_restore_stop_signals)


def _restore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def handlers_restored(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Restore the handlers of these signals when the block ends, except those that are not Python's.

    Only the main thread can change handlers: elsewhere, there is nothing to restore.
    """
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)


def fork_under_supervisor(namespaces: bool, network: bool) -> None:
    """Fork, and return in the worker. The calling process supervises the worker and ends with its exit code.

    If the system refuses namespaces, send a message of kind "refused" on stdout and exit.
    """
    isolation.die_with_parent(KILL_REQUEST)
    signals = _signals_to_pipe()
    log_reading, log_writing = os.pipe()
    if namespaces:
        _or_refuse(lambda: isolation.enter_namespaces(network))
    else:
        isolation.adopt_orphans()
    worker = os.fork()
    if worker:
        _release_pipes(log_writing)
        _supervise(worker, signals, log_reading, namespaces)
    os.close(log_reading)
    isolation.die_with_parent(signal.SIGKILL)
    if namespaces:
        _or_refuse(isolation.mount_own_proc)
        isolation.limit_processes(MAX_PROCESSES)
        os.close(signals)
        signals = _signals_to_pipe()
        worker = os.fork()
        if worker:
            _release_pipes(log_writing)
            _supervise(worker, signals, None, namespaces)
        isolation.die_with_parent(signal.SIGKILL)
        if os.geteuid():
            isolation.drop_capabilities()
    os.close(signals)
    signal.set_wakeup_fd(-1)
    for signum in (KILL_REQUEST, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.setsid()
    os.dup2(log_writing, _STDERR)
    os.close(log_writing)


def _or_refuse(step: Callable[[], None]) -> None:
    try:
        step()
    except OSError as error:
        send_json(_STDOUT, {"kind": "refused", "why": error.strerror or str(error)})
        os._exit(0)


def _release_pipes(log_writing: int) -> None:
    """Leave the result pipe to the worker alone, so that the parent sees it closed when the worker ends."""
    os.close(log_writing)
    os.dup2(_STDERR, _STDOUT)


def _signals_to_pipe() -> int:
    """Return a descriptor from which the numbers of arriving signals can be read."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for signum in (KILL_REQUEST, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    return reading


def _supervise(worker: int, signals: int, log: int | None, namespaces: bool) -> NoReturn:
    """Wait until the worker ends, the parent ends (our stdin is closed), or a KILL_REQUEST arrives; then kill all."""
    poll = select.poll()
    poll.register(_STDIN, 0)  # hang-ups only: the worker reads what the parent sends
    poll.register(signals, select.POLLIN)
    if log is not None:
        poll.register(log, select.POLLIN)
    code: int | None = None
    while code is None:
        ready = dict(poll.poll())
        if log in ready and log is not None and not _copy_log(log):
            poll.unregister(log)
        if signals in ready:
            if KILL_REQUEST in os.read(signals, 1000):
                break
            code = _reap(worker)
        if _STDIN in ready:
            break
    if os.getpid() != 1:  # when the first process of a namespace ends, the kernel kills the others
        code = _kill_all(worker, code, namespaces)
    if log is not None:
        os.set_blocking(log, False)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and _copy_log(log):
            pass
    os._exit(1 if code is None else code)


def _copy_log(log: int) -> bool:
    """Copy some of the worker's stderr to ours; return False if there is no more."""
    if not select.select([], [_STDERR], [], 0.05)[1]:
        return True  # the reader of our stderr is slow
    try:
        text = os.read(log, _COPY_BYTES)
    except BlockingIOError:
        return False
    with suppress(OSError):
        os.write(_STDERR, text)
    return bool(text)


def _reap(worker: int) -> int | None:
    """Reap all children that have ended; return the worker's exit code if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code if code is None or code >= 0 else 128 - code


def _kill_all(worker: int, code: int | None, namespaces: bool) -> int | None:
    """Kill the worker and everything it started; return the worker's exit code."""
    if code is None:
        os.kill(worker, signal.SIGKILL)
        if namespaces:
            os.waitpid(worker, 0)  # returns when all processes of the namespace have ended
    if namespaces:
        return code
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + KILL_LIMIT_S
    while (alive := _descendants(os.getpid())) and time.monotonic() < deadline:
        _kill(alive)
        _reap(worker)
        time.sleep(0.002)
    return code


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _descendants(ancestor: int) -> list[int]:
    """Return all processes below a process, from /proc (Linux). Elsewhere only the worker's process group is killed."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError, IndexError):
            stat = Path("/proc", name, "stat").read_text(errors="replace") if name.isdigit() else ""
            parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    tree, descendants = {ancestor}, []
    while new := [pid for pid, parent in parents.items() if parent in tree and pid not in tree]:
        tree.update(new)
        descendants += new
    return descendants


Call = tuple[str, Sequence[Any]]  # name of a method and its arguments
Reply = tuple[Any, BaseException | None, list[tuple[type[Warning], str]]]


class WorkerDied(Exception):
    """The worker process ended instead of replying."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class RemoteWorker(ChildProcess):
    """A child process whose module calls `serve`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of the method. Its warnings are issued here and its error is raised here."""
        try:
            self.send((method, arguments))
            result, error, caught = self.receive()
        except (EOFError, BrokenPipeError):
            raise WorkerDied(self.process.wait()) from None
        for category, text in caught:
            warnings.warn(text, category, stacklevel=2)
        if error is not None:
            raise error
        return result


def serve(target: object) -> NoReturn:
    """In the worker: answer calls to methods of `target` until the parent process ends, or closes the pipe."""
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(incoming, calls), daemon=True).start()
    while True:
        method, arguments = calls.get()
        send(outgoing, reply(getattr(target, method), arguments))


def _listen(incoming: int, calls: queue.SimpleQueue[Call]) -> None:
    """In its own thread, so that the process ends with its parent even in the middle of a call."""
    try:
        while True:
            calls.put(receive(incoming))
    except EOFError:
        os._exit(1)
    except BaseException:  # a malformed message would never be answered
        traceback.print_exc()
        os._exit(1)


def reply(method: Callable[..., Any], arguments: Sequence[Any]) -> Reply:
    """Call the method; its result or error, and the warnings it issued."""
    result, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        try:
            result = method(*arguments)
        except BaseException as raised:
            error = _portable(raised)
    categories = [warning.category if warning.category.__module__ == "builtins" else UserWarning for warning in caught]
    return result, error, [(kind, str(warning.message)) for kind, warning in zip(categories, caught, strict=True)]


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note; a RuntimeError with the same text if it cannot be pickled."""
    note = "in the worker process:\n" + "".join(traceback.format_exception(error))
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    return sent


# Messages over pipes

MAX_JSON = 16 << 20  # bytes per message
READ_AHEAD = 1 << 20  # bytes that a `LoopPipe` buffers
_CHUNK = 1 << 16  # bytes per read: the capacity of a pipe
LENGTH = struct.Struct("<Q")
_encode = json.JSONEncoder(ensure_ascii=False).encode


class BadMessage(Exception):
    """A message violates the protocol; the text says how, in one line."""


def send(descriptor: int, message: Any, deadline: float | None = None) -> None:
    """Send a pickled message.

    With a deadline the descriptor must be non-blocking; raises TimeoutError if the message is not written by then.
    """
    send_bytes(descriptor, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), deadline)


def receive(descriptor: int) -> Any:
    """Return the next pickled message. Raises EOFError if the other end is closed."""
    (length,) = LENGTH.unpack(_read(descriptor, LENGTH.size))
    return pickle.loads(_read(descriptor, length))


def send_json(descriptor: int, message: dict[str, Any]) -> None:
    send_bytes(descriptor, encode_json(message))


def encode_json(message: dict[str, Any]) -> bytes:
    """Encode a message; lone surrogates, NaN and infinities are preserved. Raises BadMessage if it is too long."""
    payload = _encode(message).encode("utf-8", "surrogatepass")
    if len(payload) > MAX_JSON:
        raise BadMessage(f"it is longer than {MAX_JSON >> 20} MiB")
    return payload


class LoopPipe:
    """Sends and receives lists of pickled messages between event loops, so both ends must be trusted.

    Messages that are sent in one iteration of the loop, or by callbacks of futures that it finishes, travel together.
    """

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._pipes = incoming, outgoing
        self._unsent: list[Any] = []
        self._incoming: asyncio.ReadTransport | None = None
        self._outgoing: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        import asyncio  # late: most processes that use this module need no event loop

        self._loop, self._reader = asyncio.get_running_loop(), asyncio.StreamReader(READ_AHEAD)
        incoming, outgoing = self._pipes
        protocol = asyncio.StreamReaderProtocol(self._reader)
        self._incoming, _ = await self._loop.connect_read_pipe(lambda: protocol, incoming)
        self._outgoing, _ = await self._loop.connect_write_pipe(asyncio.BaseProtocol, outgoing)

    def close(self) -> None:
        """Close both pipes. What is not written yet is lost."""
        if self._incoming is not None:
            self._incoming.close()
        if self._outgoing is not None and not self._outgoing.is_closing():
            self._outgoing.abort()

    def send(self, message: Any) -> None:
        """Never waits."""
        if not self._unsent:
            self._loop.call_soon(self._loop.call_soon, self._flush)
        self._unsent.append(message)

    async def receive(self) -> list[Any]:
        """The next messages. Raises EOFError or OSError if the other end is closed."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    def _flush(self) -> None:
        payload, self._unsent = pickle.dumps(self._unsent, protocol=pickle.HIGHEST_PROTOCOL), []
        if self._outgoing is not None and not self._outgoing.is_closing():
            self._outgoing.write(LENGTH.pack(len(payload)) + payload)


class JsonReader:
    """Reads messages from an untrusted process, buffering all bytes that are available."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()

    def receive(self, deadline: float, limit: int = MAX_JSON) -> dict[str, Any]:
        """Return the next message, a dict with a text `kind`, of at most `limit` bytes.

        Raises EOFError if the other end is closed, TimeoutError at the deadline, BadMessage if it is malformed.
        """
        (length,) = LENGTH.unpack(self._take(LENGTH.size, deadline))
        if length > limit:
            raise BadMessage(f"it announces {length} bytes")
        payload = self._take(length, deadline)
        try:
            message = json.loads(payload.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"it is not JSON ({type(error).__name__})") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise BadMessage("it has no kind")
        return message

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            if not _wait_until_ready(self._descriptor, select.POLLIN, deadline):
                raise TimeoutError
            part = os.read(self._descriptor, _CHUNK)
            if not part:
                raise EOFError
            self._buffer += part
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def send_bytes(descriptor: int, payload: bytes, deadline: float | None = None) -> None:
    rest = memoryview(LENGTH.pack(len(payload)) + payload)
    while rest:
        if deadline is not None and not _wait_until_ready(descriptor, select.POLLOUT, deadline):
            raise TimeoutError
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), _CHUNK))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _wait_until_ready(descriptor: int, event: int, deadline: float) -> bool:
    """Return whether the descriptor can be read or written before the deadline. After the deadline it is polled once,
    so that a parent that reads late does not count as a slow worker."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
