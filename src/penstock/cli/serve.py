"""`penstock serve`: a model behind OpenAI's HTTP routes."""

from __future__ import annotations

import logging
import os
import sys

from penstock.cli._app import configured
from penstock.serve.settings import ServeConfig


@configured(ServeConfig, positional="model")
def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP, with OpenAI's routes.

    Answers completions, chats, embeddings, classes and translations, as far as MODEL can. Requests join the running
    batch as they arrive. SIGTERM and Ctrl-C stop the server once running requests have ended.

        penstock serve runs/gpt-tiny/export
    """
    from penstock.serve.serve import key_of
    from penstock.serve.serve import serve as run

    logging.basicConfig(level=logging.WARNING, format="penstock: %(message)s", stream=sys.stderr)
    key = key_of(config, os.environ.get("PENSTOCK_API_KEY"))
    run(config, key=key, tell=lambda line: print(line, flush=True))
