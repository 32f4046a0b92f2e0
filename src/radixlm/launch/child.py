"""This module owns the child processes: `python -m radixlm.launch.child ROLE DIRECTORY ...` becomes an engine, a
detokenizer or a rank of an engine.

A child that cannot start sends one `Boot` message with the reason and exits with `FAILED_STATUS`. A child whose parent
dies is killed by the kernel, so that nothing outlives a server, however it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import msgspec
import setproctitle
import zmq

from radixlm.base.errors import RadixError
from radixlm.config.resolve import from_flat
from radixlm.config.schema import Config
from radixlm.launch.topology import Topology
from radixlm.observe.log import setup
from radixlm.wire.link import FrameInbox, ZmqInbox, ZmqOutbox
from radixlm.wire.messages import Boot, Ready, ToApi, ToDetokenizer, ToEngine

#: Exit status of a child that has told its parent why it cannot start.
FAILED_STATUS = 3

#: Exit status of an engine that has lost a rank, and of a rank that failed.
LOST_STATUS = 4

_PR_SET_PDEATHSIG = 1

log = logging.getLogger("radixlm.launch")


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux; elsewhere the supervisor's own clean-up has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before we could ask


def run_engine(config: Config, topology: Topology) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    to_api: ZmqOutbox[ToApi] = ZmqOutbox(context, topology.api)
    # Requests that arrive while the model loads wait in this socket.
    inbox: ZmqInbox[ToEngine] = ZmqInbox(context, topology.engine, ToEngine)
    to_text: ZmqOutbox[ToDetokenizer] = ZmqOutbox(context, topology.detokenizer)
    # Imported here: a detokenizer does not need it.
    from radixlm.engine.build import make_loop
    from radixlm.launch.ranks import started
    from radixlm.runner.base import EngineLost

    lost = _Lost(topology)
    with contextlib.ExitStack() as stack:
        try:
            booted = stack.enter_context(
                started(config, lambda stage, fraction: to_api.send(Boot("engine", stage, fraction)), lost, topology)
            )
            loop = make_loop(booted.config, booted.facts, booted.runner, inbox, to_text, to_api)
            to_api.send(Ready("engine", booted.facts))
        except RadixError as error:
            to_api.send(Boot("engine", "failed", error=error.message))
            stack.close()
            _leave(context, to_api)
        try:
            loop.run()
        except EngineLost as error:
            lost(str(error))
    to_text.close()
    to_api.close()
    inbox.close()
    context.term()


class _Lost:
    """The end of an engine that cannot compute any more: tell why, and be gone.

    It is called by the thread that sees a rank end, whatever the engine is waiting for then, or by a step that fails.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._once = threading.Lock()

    def __call__(self, reason: str) -> NoReturn:
        self._once.acquire()  # and never released: whoever comes second waits for the end
        log.critical("the engine ends: %s", reason)
        # A socket belongs to one thread, so this needs one of its own.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        to_api: ZmqOutbox[ToApi] = ZmqOutbox(context, self._topology.api)
        to_api.send(Boot("engine", "lost", error=reason))
        to_api.close()
        context.term()
        # At once: ranks that wait for each other cannot be asked to leave. They die with their parent.
        os._exit(LOST_STATUS)


def run_rank(config: Config, topology: Topology, number: int, news: int) -> NoReturn:
    """
    Args:
        news: file descriptor of a pipe to the engine.
    """
    role = f"rank {number}"
    os.set_inheritable(news, False)  # a compiler that this starts must not keep it open

    def tell(stage: str, error: str = "") -> None:
        os.write(news, msgspec.json.encode(Boot(role, stage, error=error)) + b"\n")

    status = 0
    try:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox = FrameInbox(context, topology.rank(number))  # bound before there is anything to send
        from radixlm.launch.ranks import HERE
        from radixlm.parallel.base import Place
        from radixlm.runner.boot import boot

        place = Place(number, config.device.tensor_parallel_size, topology.meeting)
        booted = boot(config, lambda stage, fraction: None, place, lambda: tell(HERE))
        from radixlm.runner.worker import work

        work(booted.runner, inbox)
    except RadixError as error:
        tell("failed", error.message)
        status = FAILED_STATUS
    except Exception as error:
        log.exception("%s cannot go on", role)
        tell("failed", f"{role} failed: {type(error).__name__}: {error}")
        status = LOST_STATUS
    # Not through Python's own end, which would wait for collectives that nobody completes any more.
    os._exit(status)


def run_detokenizer(config: Config, topology: Topology) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    to_api: ZmqOutbox[ToApi] = ZmqOutbox(context, topology.api)
    inbox: ZmqInbox[ToDetokenizer] = ZmqInbox(context, topology.detokenizer, ToDetokenizer)
    to_engine: ZmqOutbox[ToEngine] = ZmqOutbox(context, topology.engine)
    try:
        from radixlm.launch.parts import load_tokenizer
        from radixlm.text.worker import run

        tokenizer = load_tokenizer(config)
        to_api.send(Ready("detokenizer"))
    except RadixError as error:
        to_api.send(Boot("detokenizer", "failed", error=error.message))
        _leave(context, to_api)
    run(inbox, to_api, to_engine, tokenizer)
    to_api.close()
    to_engine.close()
    inbox.close()
    context.term()


def _leave(context: zmq.Context[zmq.Socket[bytes]], to_api: ZmqOutbox[ToApi]) -> None:
    to_api.close()
    context.destroy()
    sys.exit(FAILED_STATUS)


ROLES = {"engine": run_engine, "detokenizer": run_detokenizer}


def main(arguments: list[str]) -> None:
    role, directory, parent, *more = arguments
    die_with_parent(int(parent))
    # The parent decides when a child ends; a terminal's Ctrl-C must not reach it first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    topology = Topology(Path(directory))
    config = from_flat(json.loads(topology.config_file.read_text()))
    title = " ".join((role, *more[:1]))
    setproctitle.setproctitle(f"radixlm: {title}")
    setup(config.observe.log_level, config.observe.log_format, role=title)
    if role == "rank":
        run_rank(config, topology, *map(int, more))
    ROLES[role](config, topology)


if __name__ == "__main__":
    main(sys.argv[1:])
