"""Types of options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="")]
Json = Annotated[Flag, Parameter(name="--json")]
JsonLines = Annotated[Json, Parameter(help="Print one JSON object per line.")]
ScriptName = Annotated[str | None, Parameter(allow_leading_hyphen=False)]
ScriptArguments = Annotated[str, Parameter(allow_leading_hyphen=True)]
ModuleFlag = Annotated[Flag, Parameter(name=["--module", "-m"])]
Texts = Annotated[str, Parameter(allow_leading_hyphen=False, help="Or use --file, or a pipe.")]
TextFile = Annotated[Path | None, Parameter(help="Read texts from this file, one per line.")]
