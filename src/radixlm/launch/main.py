"""This module owns a server's life: port, children, HTTP, readiness, shutdown, exit status.

exit status 0   ended by SIGTERM or SIGINT, drained
            1   a process of the ring died
            2   could not start (raised as `StartupError`)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import setproctitle
import uvicorn
import zmq

from radixlm.api.app import build_app
from radixlm.api.hub import Hub, Stage
from radixlm.api.keyfile import read_keys
from radixlm.api.reader import SocketReader
from radixlm.api.service import Served
from radixlm.api.start import start
from radixlm.api.witness import witnesses
from radixlm.base.errors import StartupError
from radixlm.base.facts import EngineFacts
from radixlm.config.schema import Config
from radixlm.launch.parts import load_served
from radixlm.launch.supervisor import Supervisor
from radixlm.launch.topology import Topology
from radixlm.observe.log import setup
from radixlm.observe.metrics import Metrics
from radixlm.wire.link import ZmqInbox, ZmqOutbox
from radixlm.wire.messages import ToApi, ToEngine

#: Seconds that a server whose engine died stays up to tell its clients and probes so.
LAST_WORDS = 5.0

log = logging.getLogger("radixlm.launch")

Ready = Callable[[EngineFacts, str, float], None]
Progress = Callable[[str, str, float], None]


class _Http(uvicorn.Server):
    """uvicorn without its own signal handlers: when to end is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `StartupError` in one line if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        hint = "; stop what listens there or choose another --port" if error.errno == 98 else ""
        raise StartupError(f"cannot listen on {host} port {port}: {reason.lower()}{hint}") from None
    listener.setblocking(False)
    return listener


def serve(config: Config, on_ready: Ready, on_progress: Progress) -> int:
    """Serve until told to stop. Returns the exit status.

    Args:
        on_ready: called once with the facts, the URL and the seconds it took.
        on_progress: called with (process, stage, fraction) while starting.

    Raises:
        StartupError: the server cannot start; nothing is left behind.
    """
    setproctitle.setproctitle("radixlm: api")
    setup(config.observe.log_level, config.observe.log_format, role="api")
    started = time.monotonic()
    # Before anything slow: a taken port is the most common mistake.
    if config.server.api_key_file is not None:
        read_keys(config.server.api_key_file)
    listener = listen(config.server.host, config.server.port)
    try:
        served = load_served(config, lambda stage, fraction: on_progress("api", stage, fraction))
        server = _Server(config, served, listener, started, on_ready, on_progress)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(server.run())
    finally:
        listener.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Server:
    def __init__(
        self,
        config: Config,
        served: Served,
        listener: socket.socket,
        started: float,
        on_ready: Ready,
        on_progress: Progress,
    ) -> None:
        self._config = config
        self._served = served
        self._listener = listener
        self._started = started
        self._on_ready = on_ready
        self._on_progress = on_progress
        self._signals = 0
        self._end: asyncio.Event = asyncio.Event()
        self._now: asyncio.Event = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        topology = Topology.create()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox: ZmqInbox[ToApi] = ZmqInbox(context, topology.api, ToApi)
        outbox: ZmqOutbox[ToEngine] = ZmqOutbox(context, topology.engine)
        metrics = Metrics(self._served.name)
        hub = Hub(outbox, witnesses=witnesses(self._config.observe, metrics))
        reader = SocketReader(inbox, hub.receive)
        supervisor = Supervisor(self._config, topology, lambda role, status: self._died(hub, role, status))
        app = build_app(hub, self._served, self._config, metrics)
        http = _Http(self._uvicorn_config(app))
        serving: asyncio.Task[Any] | None = None
        try:
            reader.start()
            await supervisor.start()
            serving = asyncio.create_task(http.serve(sockets=[self._listener]), name="http")
            await self._start(hub)
            if not self._end.is_set():
                await self._end.wait()
            await self._stop(hub, http)
        finally:
            supervisor.expect_exit()
            if hub.stage is not Stage.DRAINING:
                outbox.close()
            await supervisor.stop(0 if self._now.is_set() or hub.stage is not Stage.DRAINING else 5.0)
            http.should_exit = http.force_exit = True
            if serving is not None:
                with contextlib.suppress(BaseException):
                    await asyncio.wait_for(serving, 2.0)
            reader.stop()
            inbox.close()
            context.destroy(linger=0)
            topology.remove()
        return self._status

    def _uvicorn_config(self, app: Any) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            root_path=self._config.server.root_path,
            timeout_keep_alive=75,
            # Longer than a drain may take: streams are ended by us, not by the HTTP server.
            timeout_graceful_shutdown=1,
        )

    async def _start(self, hub: Hub) -> None:
        """From starting to ready; returns early if a signal ends it."""
        ready = asyncio.create_task(start(hub, warm_up=not self._config.server.skip_server_warmup))
        ended = asyncio.create_task(self._end.wait())
        try:
            while not ready.done() and not ended.done():
                await asyncio.wait((ready, ended), timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                for progress in hub.progress:
                    self._on_progress(progress.role, progress.stage, progress.fraction)
            if ready.done():
                ready.result()
                host = self._config.server.host
                place = f"[{host}]" if ":" in host else host
                url = f"http://{place}:{self._listener.getsockname()[1]}{self._config.server.root_path}"
                self._on_ready(hub.facts, url, time.monotonic() - self._started)
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _stop(self, hub: Hub, http: uvicorn.Server) -> None:
        if self._status == 0:
            log.info("shutting down: running requests get up to %g s", self._config.server.shutdown_timeout)
            drain = asyncio.create_task(hub.drain(self._config.server.shutdown_timeout))
            now = asyncio.create_task(self._now.wait())
            await asyncio.wait((drain, now), return_when=asyncio.FIRST_COMPLETED)
            drain.cancel()
            now.cancel()
            await asyncio.gather(drain, now, return_exceptions=True)
            # The last bytes of the last streams are on their way.
            await asyncio.sleep(0 if self._now.is_set() else 0.05)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), LAST_WORDS)

    def _signalled(self) -> None:
        self._signals += 1
        self._end.set()
        if self._signals > 1:
            self._now.set()

    def _died(self, hub: Hub, role: str, status: int) -> None:
        if status == 0 and hub.stage is Stage.DRAINING:
            return  # as it was told to
        starting = hub.stage is Stage.STARTING
        how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
        reason = f"the {role} process {how}"
        # One that could not start has said why; its message may still be on its way to the reader.
        asyncio.get_running_loop().call_later(0.2, hub.engine_died, reason) if starting else hub.engine_died(reason)
        if not starting:
            log.error("%s; ending the server", reason)
            self._status = 1
            self._end.set()
