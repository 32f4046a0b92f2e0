"""This module owns the child processes: `python -m radixlm.launch.child ROLE DIRECTORY` becomes an engine or a
detokenizer.

A child that cannot start sends one `Boot` message with the reason and exits with `FAILED_STATUS`. A child whose parent
dies is killed by the kernel, so that nothing outlives a server, however it ended.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path

import setproctitle
import zmq

from radixlm.base.errors import RadixError
from radixlm.config.resolve import from_flat
from radixlm.config.schema import Config
from radixlm.launch.topology import Topology
from radixlm.observe.log import setup
from radixlm.wire.link import ZmqInbox, ZmqOutbox
from radixlm.wire.messages import Boot, Ready, ToApi, ToDetokenizer, ToEngine

#: Exit status of a child that has told its parent why it cannot start.
FAILED_STATUS = 3

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
    try:
        # Imported here: torch takes a second or two, and a detokenizer does not need it.
        from radixlm.engine.build import make_loop
        from radixlm.runner.boot import boot

        booted = boot(config, lambda stage, fraction: to_api.send(Boot("engine", stage, fraction)))
        loop = make_loop(booted.config, booted.facts, booted.runner, inbox, to_text, to_api)
        to_api.send(Ready("engine", booted.facts))
    except RadixError as error:
        to_api.send(Boot("engine", "failed", error=error.message))
        _leave(context, to_api)
    loop.run()
    to_text.close()
    to_api.close()
    inbox.close()
    context.term()


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
    role, directory, parent = arguments
    die_with_parent(int(parent))
    # The parent decides when a child ends; a terminal's Ctrl-C must not reach it first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    topology = Topology(Path(directory))
    config = from_flat(json.loads(topology.config_file.read_text()))
    setproctitle.setproctitle(f"radixlm: {role}")
    setup(config.observe.log_level, config.observe.log_format, role=role)
    ROLES[role](config, topology)


if __name__ == "__main__":
    main(sys.argv[1:])
