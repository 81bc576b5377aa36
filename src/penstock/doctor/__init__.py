"""Find out what works on this machine by trying it, and say how to fix what does not.

Nothing here trusts a version number where a small computation can show it. The checks themselves import torch, so that
a broken torch is a finding and not a traceback.
"""

from __future__ import annotations

from penstock.doctor import installation, numerics
from penstock.doctor.finding import Finding

__all__ = ["Finding", "examine", "healthy"]


def examine(*, thorough: bool = False) -> list[Finding]:
    """All checks of this installation, in reading order.

    With `thorough`, torch.compile compiles a real function (up to half a minute), and not only its compiler is tried.
    """
    findings = [installation.python(), *installation.core_packages(), installation.torch()]
    if findings[-1].status != "ok":
        return findings
    findings += [*installation.optional_packages(), installation.torchvision(), *installation.devices()]
    for device in installation.usable_devices():
        findings += [*numerics.types(device), *numerics.attention(device)]
    findings += [
        installation.compiler(),
        *([installation.compile()] if thorough else []),
        installation.triton(),
        *installation.distributed(),
        installation.shared_memory(),
        installation.probed(),
    ]
    return findings


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing that Penstock requires is broken."""
    return not any(finding.required and finding.status == "broken" for finding in findings)
