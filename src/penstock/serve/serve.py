"""`penstock serve`: one model over HTTP, until it is asked to stop."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.boundary.files import read_text
from penstock.boundary.hub import local_weights
from penstock.boundary.packages import package
from penstock.config.load import to_dict
from penstock.data.text.chat import template_of
from penstock.data.text.open import found_in
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.serve.backend import Backend
from penstock.serve.settings import ServeConfig

BACKLOG = 1024
"""Connections that may wait to be accepted, for example while the model loads."""
OPENER = "penstock.serve.worker:opened"


def serve(
    config: ServeConfig, *, key: str | None = None, tell: Callable[[str], None] = print, opener: str = OPENER
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in progress and return. `key` is the key that clients
    must send.

    Raises ConfigError and the errors of opening the model; EnvironmentProblem without the extra `serve`, or if the port
    is in use.
    """
    for name in ("starlette", "uvicorn"):
        package(name, f"penstock serve needs the package {name}", "serve")
    if config.model is None:
        raise ConfigError(
            "penstock serve needs a model: a run's folder, one that transformers wrote, or a name on the hub."
        )
    folder = local_weights(config.model)
    if not folder.is_dir():
        raise ConfigError(
            f"There is no folder {folder}. Give a run's folder, or one that transformers wrote."
        )
    asyncio.run(_serve(config, folder, key, tell, opener))


def key_of(config: ServeConfig, environment: str | None) -> str | None:
    """The key that clients must send: from the file that is set, else from the environment. Raises ConfigError for an
    empty file."""
    if config.api_key_file is None:
        return environment or None
    key = read_text(config.api_key_file, "The key's file", limit=4096, error=ConfigError).strip()
    if not key:
        raise ConfigError(f"The key's file {config.api_key_file} is empty.")
    return key


def usual_name(model: str) -> str:
    """The name of a model for clients: its name on the hub, its folder's, or the name of the run that exported it."""
    path = Path(model)
    if not path.exists():
        return model.partition("@")[0]
    path = path.resolve()
    return (path.name == "export" and path.parent.name) or path.name


async def _serve(
    config: ServeConfig, folder: Path, key: str | None, tell: Callable[[str], None], opener: str
) -> None:
    import uvicorn

    from penstock.serve.connection import HEAD_BYTES, Connection, Server
    from penstock.serve.server import Service

    listener = _listen(config)
    backend = Backend(
        {**to_dict(config), "model": str(folder)}, opener=opener, stall_seconds=config.stall_seconds
    )
    tokenizer = found_in(folder)
    service = Service(
        backend=backend, config=config, name=config.name or usual_name(str(config.model)), tokenizer=tokenizer,
        template=None if tokenizer is None else template_of(tokenizer), key=key,
    )  # fmt: skip
    # Clients' errors go to the clients, not to the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    connection: Any = functools.partial(Connection, unread_seconds=config.unread_seconds)
    server = Server(
        uvicorn.Config(
            service.app(), http=connection, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=max(1, int(config.stop_seconds)),
            timeout_keep_alive=1 << 20,  # `Connection` has its own limit, which allows slow readers
        )
    )  # fmt: skip
    await backend.start()
    try:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        tell(f"{service.name} at {url}{'' if key else ', open to whoever reaches it'}. Ctrl-C stops it.")
        await server.serve(sockets=[listener])
        service.stopping = True
    finally:
        await backend.stop()


def _listen(config: ServeConfig) -> socket.socket:
    """The socket to listen on, opened before the model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except OSError as problem:
        listener.close()
        raise EnvironmentProblem(
            f"{config.host}:{config.port} cannot be listened on: {problem.strerror or problem}. Choose another "
            "--port, or an address of this machine."
        ) from None
    return listener
