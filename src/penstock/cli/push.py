"""`penstock push`: a trained model to the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.boundary.hub import push_folder

_SHOWN = 5
"""Files that were left out and are named."""


def push(
    model: Path,
    name: str,
    *,
    private: Annotated[bool, Parameter(negative="")] = False,
    message: str = "",
    endpoint: str | None = None,
) -> None:
    """Upload a trained model to the Hugging Face hub.

    Uploads weights, configuration, tokenizer and model card. Log in first, with `hf auth login` or HF_TOKEN. A model
    that is on the hub already gets one more commit.

        penstock push runs/vit-digits me/vit-digits

    Parameters
    ----------
    model
        A run's folder or its export, or a folder that transformers wrote.
    name
        OWNER/NAME on the hub.
    private
        Make a new model visible to its owner alone.
    message
        Message of the commit.
    endpoint
        Address of another hub, in place of HF_ENDPOINT.
    """
    folder = model / "export" if (model / "export" / "config.json").is_file() else model
    address, left_out = push_folder(folder, name, private=private, message=message, endpoint=endpoint)
    if left_out:
        more = " and more" if len(left_out) > _SHOWN else ""
        print(
            f"Left out, because a model does not need it: {', '.join(left_out[:_SHOWN])}{more}",
            file=sys.stderr,
        )
    if not (folder / "README.md").is_file():
        print(
            f"There is no model card; write {folder / 'README.md'}, and push again, to say what the model is for.",
            file=sys.stderr,
        )
    print(f"{folder} is now {address}")
