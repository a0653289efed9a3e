"""``kway completion``: what a shell needs to complete the rest of a command line."""

import argparse
from collections.abc import Mapping

HELP = "print the script with which bash, zsh or fish complete what is typed"

# As LEVELS of strategies/levels.py, AUTO of strategies/layout.py, the axes of strategies/ and RULES of step/scaling.py
# have them: reading those imports torch.
EXACTNESS = ("math", "bits", "loose")
STRATEGIES = ("single", "data", "threads")
AUTO = "auto"
LR_SCALES = ("linear", "sqrt")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")
    parser.epilog = (
        "In bash and zsh: source <(kway completion SHELL). In fish: kway completion fish | source."
    )


def run(args: argparse.Namespace) -> int:
    """Print the script of a shell; returns 0. Raises ``UsageError`` for a shell that is not known."""
    from kway.cli._grammar import grammar
    from kway.cli._shells import SHELLS
    from kway.registry import known

    print(known("shell", args.shell, SHELLS)(grammar(), values()), end="")
    return 0


def values() -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Map arguments, as parsers call them, to the names that they may be, where names can be listed without torch.

    Keys are of a command and an argument; of no command, ``""``, for all that have no names of their own.
    """
    from kway.cli._choices import LOSSES, OPTIMIZERS
    from kway.cli._shells import SHELLS
    from kway.cli.data import WHATS
    from kway.data import sources
    from kway.data.originals import originals
    from kway.elsewhere.description import shipped
    from kway.job import PRECISIONS
    from kway.measuring.names import names as experiments
    from kway.step.kinds import KINDS
    from kway.trackers.chosen import NAMED
    from kway.zoo import names as models

    of_all = {
        "model": tuple(models()),
        "data": tuple(sources.names()),
        "precision": tuple(PRECISIONS),
        "exactness": EXACTNESS,
        "strategy": (AUTO, *STRATEGIES),
        "loss": tuple(LOSSES),
        "optimizer": tuple(OPTIMIZERS),
        "step_kind": (AUTO, *KINDS),
        "only": tuple(experiments()),
        "on_oom": ("error", "adapt"),
        "lr_scale": LR_SCALES,
        "tracker": tuple(NAMED),
        "allow": tuple(PRECISIONS),
        "on": tuple(shipped()),
        "what": WHATS,
        "names": tuple(originals()),
        "shell": tuple(SHELLS),
    }
    # What is proved is named, and not chosen.
    proved = {"strategy": STRATEGIES, "step_kind": tuple(KINDS)}
    return {("", name): names for name, names in of_all.items()} | {
        ("prove", name): names for name, names in proved.items()
    }
