"""One entry of a schedule: what a rank does for one stage and one micro-batch."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast

from penstock.errors import ConfigError

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""F: forward. B: the whole backward. I and W: its two halves, the gradient of the stage's input and of its
weights (Qi et al., ICLR 2024, write B for I). SEND_F and RECV_F pass an activation to the next stage, SEND_B
and RECV_B the gradient of a stage's input to the previous stage. The number in each is the stage that sends
or receives."""

COMPUTE_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
COMMUNICATION_KINDS: tuple[Kind, ...] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

_WRITTEN = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)", re.ASCII)


class Action(NamedTuple):
    """Stage, kind and micro-batch, written `2B3`: the notation that torch.distributed.pipelining prints and parses."""

    stage: int
    kind: Kind
    micro_batch: int

    @classmethod
    def parse(cls, word: str) -> Action:
        """The action for a word such as `2B3` or `0SEND_F1`. Raises `ConfigError` for any other word."""
        match = _WRITTEN.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"{word!r} is not an action of a schedule; write stage, kind and micro-batch, such as 2B3, with one of "
                f"the kinds {', '.join(COMPUTE_KINDS + COMMUNICATION_KINDS)}."
            )
        stage, kind, micro_batch = match.groups()
        return cls(int(stage), cast(Kind, kind), int(micro_batch))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def communicates(self) -> bool:
        """Whether this is a send or a receive rather than a computation."""
        return self.kind in COMMUNICATION_KINDS
