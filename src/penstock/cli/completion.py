"""`penstock completion`: a script by which a shell completes verbs and options."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a script with which bash, zsh or fish completes verbs and options.

    Nothing is installed. Where the script belongs depends on the shell:

        bash: source <(penstock completion bash), in ~/.bashrc
        zsh: penstock completion zsh > DIR/_penstock, where DIR is in $fpath
        fish: penstock completion fish > ~/.config/fish/completions/penstock.fish

    `penstock --install-completion` does this for the running shell.

    Parameters
    ----------
    shell
        `bash`, `zsh` or `fish`.
    """
    from penstock.cli import app

    print(app.generate_completion(prog_name="penstock", shell=shell))
